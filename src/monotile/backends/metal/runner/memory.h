// The interface between the scheduler (runtime.cpp) and the checked memory (memory.cpp).
#pragma once
#include "abi.h"

extern "C" {
void mt_add_finding(mt::Finding *finding);
void mt_start_group();
void mt_advance_group(mt::u32 flags);
void mt_advance_simdgroup(mt::u32 simdgroup, mt::u32 flags);
void mt_fault(const char *address, int kind, bool on_stack);
[[noreturn]] void mt_stop();
}
