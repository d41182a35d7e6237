/// manifest.json, as manifest.schema.json of monotile describes it.
public struct Manifest: Decodable {
    public let kernels: [Kernel]
    public let chains: [Chain]
}

public struct Kernel: Decodable {
    public let name: String
    public let file: String
    public let buffers: [Buffer]
    public let grid: [Expression]
    public let threads: [Int]
    public let relations: [Expression]
    public let languageVersion: String
    public let threadgroupMemoryBytes: Int
    public let registersPerThread: Int

    enum CodingKeys: String, CodingKey {
        case name, file, buffers, grid, threads, relations
        case languageVersion = "language_version"
        case threadgroupMemoryBytes = "threadgroup_memory_bytes"
        case registersPerThread = "registers_per_thread"
    }
}

/// A tensor, or words: numbers that the launch passes.
public struct Buffer: Decodable {
    public let index: Int
    public let name: String
    public let role: String
    public let dtype: String
    public let shape: [Expression]?
    public let strides: [Int?]?
    public let words: [Word]?
}

public struct Word: Decodable {
    public let meaning: String
    public let tensor: String?
    public let axis: Int?
    public let name: String?
}

public struct Chain: Decodable {
    public let name: String
    public let tensors: [ChainTensor]
    public let scalars: [ChainScalar]
    public let launches: [ChainLaunch]
}

public struct ChainTensor: Decodable {
    public let name: String
    public let role: String
    public let dtype: String
    public let shape: [Expression]
}

public struct ChainScalar: Decodable {
    public let name: String
    public let dtype: String
    public let `default`: Expression?
}

public struct ChainLaunch: Decodable {
    public let kernel: String
    public let tensors: [String: BoundTensor]
    public let scalars: [String: Expression]
}

public struct BoundTensor: Decodable {
    public let tensor: String
    public let shape: [Expression]
}

public struct LaunchError: Error, CustomStringConvertible {
    public let description: String

    public init(_ description: String) { self.description = description }
}

public let elementBytes = [
    "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
]
