import Foundation

/// check.json: inputs, numbers and expected outputs of a run of each chain.
public struct Checks: Decodable {
    public let cases: [CheckCase]
}

public struct CheckCase: Decodable {
    public let chain: String
    public let numbers: [String: Double]
    public let inputs: [String: CheckArray]
    public let outputs: [String: CheckArray]
}

public struct CheckArray: Decodable {
    public let file: String
    public let dtype: String
    public let shape: [Int]
    public let allowed: Double?  // the greatest difference of an element

    func load(_ folder: URL) throws -> HostArray {
        HostArray(shape: shape, dtype: dtype, bytes: try Data(contentsOf: folder.appendingPathComponent(file)))
    }
}

public struct CheckReport {
    public var ok = true
    public var lines: [String] = []
    public var text: String { lines.joined(separator: "\n") }
}

/// Run every case of a folder in safe and in fast math, and say what came out.
public func check(_ folder: URL) throws -> CheckReport {
    let data = try Data(contentsOf: folder.appendingPathComponent("check.json"))
    let checks = try JSONDecoder().decode(Checks.self, from: data)
    var report = CheckReport()
    for fastMath in [false, true] {
        let launcher = try Launcher(folder: folder, fastMath: fastMath)
        if !fastMath {
            let system = ProcessInfo.processInfo.operatingSystemVersionString
            report.lines.append("monotile report: \(launcher.device.name), \(system)")
        }
        for kernel in launcher.manifest.kernels {
            let made = try launcher.pipeline(kernel)
            let limits = "at most \(made.maxTotalThreadsPerThreadgroup) threads, width \(made.threadExecutionWidth)"
            let memory = "\(made.staticThreadgroupMemoryLength) bytes of threadgroup memory"
            let model = "\(kernel.registersPerThread) registers by monotile's model"
            let size = "\(kernel.threads[0]) threads, \(limits), \(memory), \(model)"
            report.lines.append("\(mode(fastMath)) \(kernel.name): \(size)")
        }
        for each in checks.cases { try run(each, launcher, folder, fastMath, &report) }
    }
    report.lines.append(report.ok ? "all results agree" : "SOME RESULTS DIFFER")
    return report
}

private func mode(_ fastMath: Bool) -> String { fastMath ? "fast math" : "safe math" }

private func run(
    _ each: CheckCase, _ launcher: Launcher, _ folder: URL, _ fastMath: Bool, _ report: inout CheckReport
) throws {
    guard let chain = launcher.manifest.chains.first(where: { $0.name == each.chain }) else {
        throw LaunchError("the manifest has no chain \(each.chain)")
    }
    let inputs = try each.inputs.mapValues { try $0.load(folder) }
    var result = try launcher.run(chain, inputs: inputs, numbers: each.numbers)
    for (name, wanted) in each.outputs.sorted(by: { $0.key < $1.key }) {
        guard let found = result.outputs[name] else { throw LaunchError("\(each.chain) has no output \(name)") }
        let error = greatestDifference(elements(found), elements(try wanted.load(folder)))
        let allowed = wanted.allowed ?? 0
        let good = found.shape == wanted.shape && error <= allowed
        report.ok = report.ok && good
        let verdict = good ? "ok" : "WRONG"
        report.lines.append("\(mode(fastMath)) \(each.chain).\(name): \(verdict), error \(error) of \(allowed) allowed")
    }
    var best = result.gpuSeconds
    for _ in 0..<10 {
        result = try launcher.run(chain, inputs: inputs, numbers: each.numbers)
        best = min(best, result.gpuSeconds)
    }
    report.lines.append("\(mode(fastMath)) \(each.chain): \(best * 1e6) us on the GPU, best of 11")
}

/// Infinity where one of the two is NaN, or infinite where the other is not.
func greatestDifference(_ found: [Double], _ wanted: [Double]) -> Double {
    if found.count != wanted.count { return .infinity }
    var greatest = 0.0
    for (x, y) in zip(found, wanted) where x != y {
        let difference = abs(x - y)
        greatest = difference.isNaN ? .infinity : max(greatest, difference)
        if greatest == .infinity { break }
    }
    return greatest
}

func elements(_ array: HostArray) -> [Double] {
    let count = array.shape.reduce(1, *)
    return array.bytes.withUnsafeBytes { bytes in
        (0..<count).map { n in
            switch array.dtype {
            case "float32": return Double(bytes.loadUnaligned(fromByteOffset: 4 * n, as: Float.self))
            case "float16": return half(bytes.loadUnaligned(fromByteOffset: 2 * n, as: UInt16.self))
            case "bfloat16":
                let bits = UInt32(bytes.loadUnaligned(fromByteOffset: 2 * n, as: UInt16.self)) << 16
                return Double(Float(bitPattern: bits))
            case "int64": return Double(bytes.loadUnaligned(fromByteOffset: 8 * n, as: Int64.self))
            case "int32": return Double(bytes.loadUnaligned(fromByteOffset: 4 * n, as: Int32.self))
            case "int8": return Double(bytes.loadUnaligned(fromByteOffset: n, as: Int8.self))
            default: return Double(bytes[n])
            }
        }
    }
}

/// The value of a float16; Swift has no such type on Intel Macs.
func half(_ bits: UInt16) -> Double {
    let sign = bits >> 15 == 0 ? 1.0 : -1.0
    let exponent = Int(bits >> 10 & 31), fraction = Double(bits & 1023)
    if exponent == 31 { return fraction == 0 ? sign * .infinity : .nan }
    if exponent == 0 { return sign * fraction * 0x1p-24 }
    return sign * (1 + fraction / 1024) * Double(sign: .plus, exponent: exponent - 15, significand: 1)
}
