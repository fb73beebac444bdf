//! A JSON grammar (RFC 8259) that is fed one byte at a time.
//!
//! It accepts one object, in constant memory: depth is limited to that of `serde_json`, so one bit per level fits a word.

/// Levels of nesting, the outermost object included.
const MAX_DEPTH: u32 = 127;

/// The byte cannot continue the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Invalid;

/// What a byte was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// White space, punctuation, or the inside of a value.
    Other,
    /// The quotation mark that opens a name.
    KeyStart,
    /// The quotation mark that closes it.
    KeyEnd,
    /// The quotation mark that opens a string value.
    StringStart,
    /// The quotation mark that closes it.
    StringEnd,
    /// The first byte of a number or literal.
    ScalarStart,
    /// The brace that opens an object.
    ObjectStart,
    /// The bracket that opens a list.
    ListStart,
    /// The bracket or brace that closes either.
    Close,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In front of the outermost brace.
    Begin,
    Value,
    /// Behind `[`.
    ValueOrEnd,
    Key,
    /// Behind `{`.
    KeyOrEnd,
    Colon,
    AfterValue,
    Text(Inside),
    Number(Digits),
    Literal(&'static [u8]),
    End,
}

/// Where in a string a byte stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inside {
    key: bool,
    escape: Escape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    No,
    Backslash,
    Hex(u8),
}

/// What of a number has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Digits {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

/// The state of the grammar behind some bytes of an object.
#[derive(Debug, Clone)]
pub(super) struct JsonScanner {
    state: State,
    depth: u32,
    /// One bit per level: set for an object.
    objects: u128,
}

impl JsonScanner {
    pub(super) fn new() -> Self {
        Self {
            state: State::Begin,
            depth: 0,
            objects: 0,
        }
    }

    /// Open objects and lists.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Whether the outermost object is closed.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::End
    }

    /// Takes the next byte. After an error the scanner is of no more use.
    pub(super) fn push(&mut self, byte: u8) -> Result<Mark, Invalid> {
        match self.state {
            State::Text(inside) => self.text(inside, byte),
            State::Number(digits) => match number(digits, byte) {
                Some(next) => {
                    self.state = State::Number(next);
                    Ok(Mark::Other)
                }
                None if digits.may_end() => {
                    self.state = State::AfterValue;
                    self.structure(byte)
                }
                None => Err(Invalid),
            },
            State::Literal([next, rest @ ..]) if *next == byte => {
                self.state = if rest.is_empty() {
                    State::AfterValue
                } else {
                    State::Literal(rest)
                };
                Ok(Mark::Other)
            }
            State::Literal(_) => Err(Invalid),
            _ => self.structure(byte),
        }
    }

    fn structure(&mut self, byte: u8) -> Result<Mark, Invalid> {
        let in_object = self.depth > 0 && self.objects >> (self.depth - 1) & 1 == 1;
        match (self.state, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => Ok(Mark::Other),
            (State::Begin, b'{') => self.open(true),
            (State::Key | State::KeyOrEnd, b'"') => {
                self.state = string(true);
                Ok(Mark::KeyStart)
            }
            (State::KeyOrEnd, b'}') => Ok(self.close()),
            (State::AfterValue, b'}') if in_object => Ok(self.close()),
            (State::ValueOrEnd, b']') => Ok(self.close()),
            (State::AfterValue, b']') if !in_object => Ok(self.close()),
            (State::Colon, b':') => self.turn(State::Value),
            (State::AfterValue, b',') if in_object => self.turn(State::Key),
            (State::AfterValue, b',') => self.turn(State::Value),
            (State::Value | State::ValueOrEnd, byte) => self.value(byte),
            _ => Err(Invalid),
        }
    }

    fn value(&mut self, byte: u8) -> Result<Mark, Invalid> {
        self.state = match byte {
            b'{' => return self.open(true),
            b'[' => return self.open(false),
            b'"' => {
                self.state = string(false);
                return Ok(Mark::StringStart);
            }
            b'-' => State::Number(Digits::Minus),
            b'0' => State::Number(Digits::Zero),
            b'1'..=b'9' => State::Number(Digits::Integer),
            b't' => State::Literal(b"rue"),
            b'f' => State::Literal(b"alse"),
            b'n' => State::Literal(b"ull"),
            _ => return Err(Invalid),
        };
        Ok(Mark::ScalarStart)
    }

    fn open(&mut self, object: bool) -> Result<Mark, Invalid> {
        if self.depth == MAX_DEPTH {
            return Err(Invalid);
        }
        let bit = 1 << self.depth;
        self.depth += 1;
        if object {
            self.objects |= bit;
            self.state = State::KeyOrEnd;
            return Ok(Mark::ObjectStart);
        }
        self.objects &= !bit;
        self.state = State::ValueOrEnd;
        Ok(Mark::ListStart)
    }

    fn close(&mut self) -> Mark {
        self.depth -= 1;
        self.state = if self.depth == 0 {
            State::End
        } else {
            State::AfterValue
        };
        Mark::Close
    }

    fn turn(&mut self, state: State) -> Result<Mark, Invalid> {
        self.state = state;
        Ok(Mark::Other)
    }

    fn text(&mut self, inside: Inside, byte: u8) -> Result<Mark, Invalid> {
        let escape = match (inside.escape, byte) {
            (Escape::No, b'"') => {
                let (state, mark) = if inside.key {
                    (State::Colon, Mark::KeyEnd)
                } else {
                    (State::AfterValue, Mark::StringEnd)
                };
                self.state = state;
                return Ok(mark);
            }
            (Escape::No, b'\\') => Escape::Backslash,
            (Escape::No, 0..=0x1F) => return Err(Invalid),
            (Escape::No, _) => Escape::No,
            (Escape::Backslash, b'u') => Escape::Hex(4),
            (Escape::Backslash, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                Escape::No
            }
            (Escape::Hex(1), byte) if byte.is_ascii_hexdigit() => Escape::No,
            (Escape::Hex(left), byte) if byte.is_ascii_hexdigit() => Escape::Hex(left - 1),
            _ => return Err(Invalid),
        };
        self.state = State::Text(Inside { escape, ..inside });
        Ok(Mark::Other)
    }
}

impl Digits {
    fn may_end(self) -> bool {
        matches!(
            self,
            Self::Zero | Self::Integer | Self::Fraction | Self::Power
        )
    }
}

fn string(key: bool) -> State {
    State::Text(Inside {
        key,
        escape: Escape::No,
    })
}

/// What a number has become with one more byte, or `None` if the byte is no part of it.
fn number(digits: Digits, byte: u8) -> Option<Digits> {
    use Digits::{Exponent, Fraction, Integer, Minus, Point, Power, Sign, Zero};
    Some(match (digits, byte) {
        (Minus, b'0') => Zero,
        (Minus, b'1'..=b'9') | (Integer, b'0'..=b'9') => Integer,
        (Zero | Integer, b'.') => Point,
        (Point | Fraction, b'0'..=b'9') => Fraction,
        (Zero | Integer | Fraction, b'e' | b'E') => Exponent,
        (Exponent, b'+' | b'-') => Sign,
        (Exponent | Sign | Power, b'0'..=b'9') => Power,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    /// Whether the bytes are one object, and nothing but white space stands behind it.
    fn accepts(text: &str) -> bool {
        let mut scanner = JsonScanner::new();
        text.bytes().all(|byte| scanner.push(byte).is_ok()) && scanner.is_done()
    }

    fn is_object(text: &str) -> bool {
        text.trim_start_matches([' ', '\t', '\n', '\r'])
            .starts_with('{')
            && serde_json::from_str::<IgnoredAny>(text).is_ok()
    }

    #[test]
    fn depth_is_limited_as_in_the_full_parser() {
        for depth in [1, 2, 126, 127, 128, 129, 5000] {
            let text = format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
            let parsed = serde_json::from_str::<serde_json::Value>(&text);
            assert_eq!(accepts(&text), parsed.is_ok(), "{depth}");
        }
    }

    #[test]
    fn bytes_are_told_apart() {
        let mut scanner = JsonScanner::new();
        let marks: Vec<Mark> = br#"{"a":[1,"b"],"c":{}}"#
            .iter()
            .map(|&byte| scanner.push(byte).unwrap())
            .filter(|&mark| mark != Mark::Other)
            .collect();
        use Mark::{Close, KeyEnd, KeyStart, ListStart, ObjectStart};
        let expected = [
            ObjectStart,
            KeyStart,
            KeyEnd,
            ListStart,
            Mark::ScalarStart,
            Mark::StringStart,
            Mark::StringEnd,
            Close,
            KeyStart,
            KeyEnd,
            ObjectStart,
            Close,
            Close,
        ];
        assert_eq!(marks, expected);
    }

    proptest! {
        #[test]
        fn any_text_is_accepted_exactly_if_the_full_parser_accepts_it(
            pieces in prop::collection::vec(prop::sample::select(vec![
                "{", "}", "[", "]", ":", ",", "\"", "\\", "\\u", "00e", "a", "é", "-", "0", "1", ".", "e", "+", "true",
                "null", "fals", " ", "\n", "\"k\":", "\"\"", "{\"k\":", "\u{1}", "1.5e-3", "\\n",
            ]), 0..14),
            wrap: bool,
        ) {
            let inner = pieces.concat();
            let text = if wrap { format!("{{\"k\":{inner}}}") } else { inner };
            prop_assert_eq!(accepts(&text), is_object(&text), "{}", text);
        }
    }
}
