// swift-tools-version:5.7
import PackageDescription

let package = Package(
    name: "MonotileKernels",
    platforms: [.macOS(.v13)],
    products: [.library(name: "MonotileKernels", targets: ["MonotileKernels"])],
    targets: [
        .target(name: "MonotileKernels"),
        .executableTarget(name: "report", dependencies: ["MonotileKernels"]),
        .testTarget(name: "MonotileKernelsTests", dependencies: ["MonotileKernels"]),
    ]
)
