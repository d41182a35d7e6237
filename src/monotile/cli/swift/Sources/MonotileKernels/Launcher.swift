import Foundation
import Metal

/// A packed array: the last axis is contiguous.
public struct HostArray {
    public var shape: [Int]
    public var dtype: String
    public var bytes: Data

    public init(shape: [Int], dtype: String, bytes: Data) {
        self.shape = shape
        self.dtype = dtype
        self.bytes = bytes
    }
}

public struct ChainResult {
    public var outputs: [String: HostArray]
    public var gpuSeconds: Double
}

/// Launches the chains of an emitted folder. It knows nothing but what the manifest says.
public final class Launcher {
    public let manifest: Manifest
    public let device: MTLDevice
    let folder: URL
    let queue: MTLCommandQueue
    let fastMath: Bool
    private var pipelines: [String: MTLComputePipelineState] = [:]

    public init(folder: URL, fastMath: Bool) throws {
        let data = try Data(contentsOf: folder.appendingPathComponent("manifest.json"))
        manifest = try JSONDecoder().decode(Manifest.self, from: data)
        guard let device = MTLCreateSystemDefaultDevice(), let queue = device.makeCommandQueue() else {
            throw LaunchError("this machine has no GPU that Metal can use")
        }
        self.device = device
        self.queue = queue
        self.folder = folder
        self.fastMath = fastMath
    }

    public func pipeline(_ kernel: Kernel) throws -> MTLComputePipelineState {
        if let made = pipelines[kernel.name] { return made }
        let options = MTLCompileOptions()
        options.fastMathEnabled = fastMath
        options.languageVersion = .version2_3
        if kernel.languageVersion == "3.1" {
            guard #available(macOS 14, iOS 17, *) else { throw LaunchError("\(kernel.name) needs macOS 14: it uses bfloat") }
            options.languageVersion = .version3_1
        }
        let source = try String(contentsOf: folder.appendingPathComponent(kernel.file), encoding: .utf8)
        let library = try device.makeLibrary(source: source, options: options)
        guard let function = library.makeFunction(name: kernel.name) else {
            throw LaunchError("\(kernel.file) has no function \(kernel.name)")
        }
        let made = try device.makeComputePipelineState(function: function)
        let threads = kernel.threads.reduce(1, *)
        if made.maxTotalThreadsPerThreadgroup < threads {
            let limit = made.maxTotalThreadsPerThreadgroup
            throw LaunchError("\(kernel.name) has \(threads) threads in a threadgroup, and this GPU takes \(limit)")
        }
        pipelines[kernel.name] = made
        return made
    }

    /// Run a chain on its inputs. `numbers` are its scalars, and lengths that no input has.
    public func run(_ chain: Chain, inputs: [String: HostArray], numbers: [String: Double]) throws -> ChainResult {
        let names = try self.names(chain, inputs, numbers)
        var memory: [String: MTLBuffer] = [:]
        var shapes: [String: [Int]] = [:]
        for tensor in chain.tensors {
            let shape = try tensor.shape.map { try $0.integer(names) }
            let count = shape.reduce(1, *) * (elementBytes[tensor.dtype] ?? 0)
            guard let buffer = device.makeBuffer(length: max(count, 16), options: .storageModeShared) else {
                throw LaunchError("there is no memory for \(count) bytes of \(tensor.name)")
            }
            memset(buffer.contents(), 255, buffer.length)  // NaN shows what was not written
            if let input = inputs[tensor.name], count > 0 {
                _ = input.bytes.withUnsafeBytes { memcpy(buffer.contents(), $0.baseAddress!, count) }
            }
            memory[tensor.name] = buffer
            shapes[tensor.name] = shape
        }
        guard let commands = queue.makeCommandBuffer(), let encoder = commands.makeComputeCommandEncoder() else {
            throw LaunchError("Metal made no command buffer")
        }
        do {
            defer { encoder.endEncoding() }  // launches of one encoder run in order
            for launch in chain.launches { try encode(launch, encoder, memory, shapes, names) }
        }
        commands.commit()
        commands.waitUntilCompleted()
        if let error = commands.error { throw LaunchError("\(chain.name) failed on the GPU: \(error)") }
        var outputs: [String: HostArray] = [:]
        for tensor in chain.tensors where tensor.role.hasSuffix("output") {
            let shape = shapes[tensor.name]!
            let count = shape.reduce(1, *) * (elementBytes[tensor.dtype] ?? 0)
            let bytes = Data(bytes: memory[tensor.name]!.contents(), count: count)
            outputs[tensor.name] = HostArray(shape: shape, dtype: tensor.dtype, bytes: bytes)
        }
        return ChainResult(outputs: outputs, gpuSeconds: commands.gpuEndTime - commands.gpuStartTime)
    }

    /// The lengths of the inputs by symbol, and the scalars.
    private func names(
        _ chain: Chain, _ inputs: [String: HostArray], _ numbers: [String: Double]
    ) throws -> [String: Double] {
        var names = numbers
        for tensor in chain.tensors where tensor.role.hasPrefix("input") {
            guard let array = inputs[tensor.name], array.dtype == tensor.dtype,
                array.bytes.count == array.shape.reduce(1, *) * (elementBytes[tensor.dtype] ?? 0)
            else { throw LaunchError("\(chain.name) takes an array \(tensor.name) of \(tensor.dtype)") }
            try match(tensor.name, tensor.shape, array.shape, &names)
        }
        for scalar in chain.scalars where names[scalar.name] == nil {
            guard let rule = scalar.default else { throw LaunchError("\(chain.name) takes a number \(scalar.name)") }
            names[scalar.name] = try rule.value(names)
        }
        return names
    }

    /// Give each symbol of a shape its length; one that has another already, or a number that differs, is an error.
    private func match(
        _ name: String, _ wanted: [Expression], _ shape: [Int], _ names: inout [String: Double]
    ) throws {
        var same = wanted.count == shape.count
        for (side, length) in zip(wanted, shape) where same {
            if let symbol = side.symbol, names[symbol] == nil { names[symbol] = Double(length) }
            same = try side.integer(names) == length
        }
        if !same { throw LaunchError("\(name) has shape \(shape); expected \(wanted.map { $0.text })") }
    }

    /// Bind the tensors and words of one launch, check its relations and dispatch its grid.
    private func encode(
        _ launch: ChainLaunch, _ encoder: MTLComputeCommandEncoder, _ memory: [String: MTLBuffer],
        _ lengths: [String: [Int]], _ names: [String: Double]
    ) throws {
        guard let kernel = manifest.kernels.first(where: { $0.name == launch.kernel }) else {
            throw LaunchError("the manifest has no kernel \(launch.kernel)")
        }
        encoder.setComputePipelineState(try pipeline(kernel))
        let scalars = try launch.scalars.mapValues { try $0.value(names) }
        var own = scalars
        var shapes: [String: [Int]] = [:]
        for buffer in kernel.buffers where buffer.role != "words" {
            guard let use = launch.tensors[buffer.name], let bound = memory[use.tensor] else {
                throw LaunchError("\(kernel.name) has no tensor for \(buffer.name)")
            }
            let shape = try use.shape.map { try $0.integer(names) }
            if shape.reduce(1, *) != lengths[use.tensor]!.reduce(1, *) {
                throw LaunchError("\(kernel.name) takes \(use.tensor) as \(shape), and it has \(lengths[use.tensor]!)")
            }
            try match(buffer.name, buffer.shape ?? [], shape, &own)
            for (axis, stride) in (buffer.strides ?? []).enumerated() where shape[axis] > 1 {
                let packed = shape[(axis + 1)...].reduce(1, *)
                if let stride = stride, stride != packed {
                    throw LaunchError("\(buffer.name) has stride \(stride) compiled in along \(axis), not \(packed)")
                }
            }
            shapes[buffer.name] = shape
            encoder.setBuffer(bound, offset: 0, index: buffer.index)
        }
        for relation in kernel.relations where try relation.value(own) == 0 {
            throw LaunchError("\(kernel.name) needs \(relation.text); found \(own)")
        }
        for buffer in kernel.buffers where buffer.role == "words" {
            let values = try (buffer.words ?? []).map { try value($0, shapes, scalars) }
            if buffer.dtype == "float32" {
                let floats = values.map { Float($0) }
                encoder.setBytes(floats, length: floats.count * 4, index: buffer.index)
            } else {
                let integers = values.map { Int64($0) }
                encoder.setBytes(integers, length: integers.count * 8, index: buffer.index)
            }
        }
        let grid = try kernel.grid.map { try $0.integer(own) }
        if grid.contains(where: { $0 <= 0 }) { return }
        encoder.dispatchThreadgroups(size(grid), threadsPerThreadgroup: size(kernel.threads))
    }

    private func size(_ sides: [Int]) -> MTLSize { MTLSize(width: sides[0], height: sides[1], depth: sides[2]) }

    private func value(_ word: Word, _ shapes: [String: [Int]], _ scalars: [String: Double]) throws -> Double {
        if word.meaning == "scalar", let name = word.name, let number = scalars[name] { return number }
        if word.meaning == "offset" || word.meaning == "nothing" { return 0 }
        guard let tensor = word.tensor, let axis = word.axis, let shape = shapes[tensor] else {
            throw LaunchError("the manifest has a word that says too little: \(word)")
        }
        return Double(word.meaning == "length" ? shape[axis] : shape[(axis + 1)...].reduce(1, *))
    }
}
