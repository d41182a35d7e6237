// Runs the programs of one launch: launch JOB RESULT. Compiled for AArch64, run in an emulator.
//
// JOB has 64-bit words: sizes of the code, the arguments and the scratch memory, offsets of `kernel` and `programs` in
// the code, numbers of imports and of regions; then each import (a name of 24 bytes, the offset of its word), the code,
// the arguments, and each region of memory: where in the arguments its address goes, what is added to that address, its
// size and its bytes. RESULT gets the bytes of all regions after the launch.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 65536  // the largest page of any system

static const struct {
    const char *name;
    void *address;
} known[] = {{"fmaf", (void *)fmaf}, {"memcpy", (void *)memcpy}, {"memmove", (void *)memmove}, {"memset", (void *)memset}};

static void *pages(size_t size) {
    void *found = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) perror("mmap"), exit(2);
    return found;
}

static void get(FILE *job, void *to, size_t size) {
    if (size && fread(to, size, 1, job) != 1) fprintf(stderr, "the job ends early\n"), exit(2);
}

int main(int count, char **names) {
    FILE *job = fopen(names[1], "rb"), *result = fopen(names[2], "wb");
    if (!job || !result) return perror("open"), 2;
    uint64_t head[7];
    get(job, head, sizeof head);
    uint64_t code_size = head[0], args_size = head[1], scratch_size = head[2], imports = head[5], regions = head[6];
    struct {
        char name[24];
        uint64_t at;
    } wanted[16];
    if (imports > 16) return fprintf(stderr, "more imports than 16\n"), 2;
    get(job, wanted, imports * sizeof *wanted);
    char *code = pages(code_size), *args = pages(args_size), *scratch = pages(scratch_size);
    get(job, code, code_size);
    get(job, args, args_size);
    for (uint64_t i = 0; i < imports; i++) {
        void *address = NULL;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (!strcmp(known[k].name, wanted[i].name)) address = known[k].address;
        if (!address) return fprintf(stderr, "no function %s\n", wanted[i].name), 2;
        memcpy(code + wanted[i].at, &address, 8);
    }
    char **memory = calloc(regions + 1, sizeof *memory);
    uint64_t *sizes = calloc(regions + 1, sizeof *sizes);
    for (uint64_t i = 0; i < regions; i++) {
        uint64_t place[3];
        get(job, place, sizeof place);
        memory[i] = pages(place[2]);
        sizes[i] = place[2];
        get(job, memory[i], place[2]);
        char *address = memory[i] + place[1];
        memcpy(args + place[0], &address, 8);
    }
    mprotect(code, code_size, PROT_READ | PROT_EXEC);
    __builtin___clear_cache(code, code + code_size);
    void (*kernel)(void *, int64_t, void *) = (void *)(code + head[3]);
    int64_t (*programs)(void *) = (void *)(code + head[4]);
    int64_t last = programs(args);
    for (int64_t i = 0; i < last; i++) {
        memset(scratch, 255, scratch_size);  // NaN: what a program does not write it must not read
        kernel(args, i, scratch);
    }
    for (uint64_t i = 0; i < regions; i++) fwrite(memory[i], 1, sizes[i], result);
    return fclose(result) ? 2 : 0;
}
