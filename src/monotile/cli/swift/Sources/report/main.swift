import Foundation
import MonotileKernels

// `swift run report` does what `swift test` does, and needs no Xcode.
var folder = URL(fileURLWithPath: #filePath)
for _ in 0..<3 { folder.deleteLastPathComponent() }
do {
    let report = try check(folder)
    print(report.text)
    exit(report.ok ? 0 : 1)
} catch {
    print("\(error)")
    exit(1)
}
