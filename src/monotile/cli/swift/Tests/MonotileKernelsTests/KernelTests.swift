import Foundation
import MonotileKernels
import XCTest

final class KernelTests: XCTestCase {
    /// Results agree with the numbers in the folder, in safe and in fast math. The report is what to send back.
    func testResults() throws {
        var folder = URL(fileURLWithPath: #filePath)
        for _ in 0..<3 { folder.deleteLastPathComponent() }
        let report = try check(folder)
        print(report.text)
        XCTAssertTrue(report.ok, report.text)
    }
}
