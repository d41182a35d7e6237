/// An expression of the manifest: numbers, names, + - * // %, min, max, == >= <=, parentheses.
/// Values are Double, which holds every length that memory can have. A comparison is 1 or 0.
public struct Expression: Decodable, Sendable {
    public let text: String

    public init(_ text: String) { self.text = text }

    public init(from decoder: Decoder) throws {
        let value = try decoder.singleValueContainer()
        if let number = try? value.decode(Int.self) {
            text = String(number)
        } else {
            text = try value.decode(String.self)
        }
    }

    /// The symbol that this is, if it is no more than a name.
    public var symbol: String? {
        let isName = text.allSatisfy { $0.isLetter || $0.isNumber || $0 == "_" }
        return isName && !(text.first?.isNumber ?? true) ? text : nil
    }

    public func value(_ names: [String: Double]) throws -> Double {
        var parser = Parser(text: text, names: names)
        return try parser.whole()
    }

    public func integer(_ names: [String: Double]) throws -> Int { Int(try value(names)) }
}

private struct Parser {
    let text: String
    let names: [String: Double]
    var tokens: [String]
    var next = 0

    init(text: String, names: [String: Double]) {
        self.text = text
        self.names = names
        tokens = Parser.split(text)
    }

    static func split(_ text: String) -> [String] {
        var tokens: [String] = []
        var word = ""
        var rest = Substring(text)
        while let character = rest.first {
            if character.isLetter || character.isNumber || character == "_" || character == "." {
                word.append(character)
                rest.removeFirst()
                continue
            }
            if !word.isEmpty {
                tokens.append(word)
                word = ""
            }
            let pair = String(rest.prefix(2))
            if ["//", "==", ">=", "<="].contains(pair) {
                tokens.append(pair)
                rest.removeFirst(2)
            } else {
                if character != " " { tokens.append(String(character)) }
                rest.removeFirst()
            }
        }
        if !word.isEmpty { tokens.append(word) }
        return tokens
    }

    var token: String { next < tokens.count ? tokens[next] : "" }

    mutating func take() -> String {
        let taken = token
        next += 1
        return taken
    }

    mutating func expect(_ wanted: String) throws {
        let found = take()
        if found != wanted { throw LaunchError("the expression \(text) has \(found) where \(wanted) was expected") }
    }

    mutating func whole() throws -> Double {
        let left = try sum()
        var result = left
        if ["==", ">=", "<="].contains(token) {
            let sign = take()
            let right = try sum()
            let holds = sign == "==" ? left == right : sign == ">=" ? left >= right : left <= right
            result = holds ? 1 : 0
        }
        if next < tokens.count { throw LaunchError("the expression \(text) goes on after its end") }
        return result
    }

    mutating func sum() throws -> Double {
        var total = try product()
        while token == "+" || token == "-" {
            let sign = take()
            let term = try product()
            total = sign == "+" ? total + term : total - term
        }
        return total
    }

    mutating func product() throws -> Double {
        var total = try factor()
        while token == "*" || token == "//" || token == "%" {
            let sign = take()
            let right = try factor()
            if sign != "*" && right == 0 { throw LaunchError("the expression \(text) divides by zero") }
            switch sign {
            case "*": total *= right
            case "//": total = (total / right).rounded(.down)
            default: total -= right * (total / right).rounded(.down)
            }
        }
        return total
    }

    mutating func factor() throws -> Double {
        let word = take()
        if word == "-" { return -(try factor()) }
        if word == "(" {
            let inner = try sum()
            try expect(")")
            return inner
        }
        if word == "min" || word == "max" {
            try expect("(")
            var result = try sum()
            while token == "," {
                _ = take()
                let other = try sum()
                result = word == "min" ? min(result, other) : max(result, other)
            }
            try expect(")")
            return result
        }
        if let number = Double(word) { return number }
        if let value = names[word] { return value }
        throw LaunchError("\(word) has no value: no input has it as a length; pass it among the numbers")
    }
}
