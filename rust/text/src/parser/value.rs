//! Values that a format writes as plain text, made into JSON of the types that the tool's schema allows.
//!
//! A number, literal, list or object of an allowed type stays as the model wrote it, any other text becomes a string; so
//! it is where nothing is known of the types. Where no string is allowed, Python's literals count too.

use serde_json::Value;

use super::call::MAX_HELD_BYTES;
use super::schema::Types;
use super::sink::Sink;

/// What may be written for a type, and its JSON; the last three only where it can be no string.
const LITERALS: &[(&str, Types, &str)] = &[
    ("true", Types::BOOLEAN, "true"),
    ("false", Types::BOOLEAN, "false"),
    ("null", Types::NULL, "null"),
    ("True", Types::BOOLEAN, "true"),
    ("False", Types::BOOLEAN, "false"),
    ("None", Types::NULL, "null"),
];
const JSON_LITERALS: usize = 3;

/// What a value can still be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Only white space so far.
    Blank,
    /// A literal, from that offset on; else a string.
    Literal(usize),
    /// A number, list or object; else a string.
    Json,
    String,
}

/// A value that is being read.
#[derive(Debug)]
pub(super) struct ParameterValue {
    types: Types,
    /// Text that may be JSON, or a newline that may be the last.
    held: String,
    kind: Kind,
    /// Whether one newline at either end belongs to the format.
    framed: bool,
    /// Whether the first newline has been dropped, or there is none.
    begun: bool,
    /// Whether the quotation mark that opens a string is out.
    quoted: bool,
}

impl ParameterValue {
    pub(super) fn new(types: Types, framed: bool) -> Self {
        let kind = if types == Types::STRING {
            Kind::String
        } else {
            Kind::Blank
        };
        Self {
            types,
            held: String::new(),
            kind,
            framed,
            begun: !framed,
            quoted: false,
        }
    }

    pub(super) fn add(&mut self, text: &str, sink: &mut Sink) {
        let mut rest = text;
        if !self.begun && !rest.is_empty() {
            rest = rest.strip_prefix('\n').unwrap_or(rest);
            self.begun = true;
        }
        for (at, character) in rest.char_indices() {
            if self.kind == Kind::String {
                self.held.push_str(&rest[at..]);
                break;
            }
            self.held.push(character);
            self.kind = self.kind_with(character);
        }
        if self.kind == Kind::String && !self.held.is_empty() {
            // A newline at the end may be the last one.
            let last = usize::from(self.framed && self.held.ends_with('\n'));
            let shown = self.held.len() - last;
            self.open(sink);
            sink.arguments(&escaped(&self.held[..shown]));
            self.held.drain(..shown);
        }
    }

    /// The kind once `character` is the last of what is held back.
    fn kind_with(&self, character: char) -> Kind {
        if self.held.len() > MAX_HELD_BYTES {
            return Kind::String;
        }
        let start = self.held.len() - character.len_utf8();
        match (self.kind, character) {
            (Kind::Blank, ' ' | '\t' | '\r' | '\n') => Kind::Blank,
            (Kind::Blank, '-' | '0'..='9') => self.json_if(Types::NUMBER),
            (Kind::Blank, '[') => self.json_if(Types::LIST),
            (Kind::Blank, '{') => self.json_if(Types::OBJECT),
            (Kind::Blank, _) if self.begins_literal(start) => Kind::Literal(start),
            (Kind::Literal(from), ' ' | '\t' | '\r' | '\n') => Kind::Literal(from),
            (Kind::Literal(from), _) if self.begins_literal(from) => Kind::Literal(from),
            (Kind::Json, _) => Kind::Json,
            _ => Kind::String,
        }
    }

    fn json_if(&self, allowed: Types) -> Kind {
        if self.types.has(allowed) {
            Kind::Json
        } else {
            Kind::String
        }
    }

    fn begins_literal(&self, from: usize) -> bool {
        let text = &self.held[from..];
        self.literals().any(|(word, _)| word.starts_with(text))
    }

    /// What may be written here, and its JSON.
    fn literals(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let types = self.types;
        let known = if types.has(Types::STRING) {
            JSON_LITERALS
        } else {
            LITERALS.len()
        };
        let allowed = LITERALS[..known]
            .iter()
            .filter(move |(_, of, _)| types.has(*of));
        allowed.map(|&(word, _, json)| (word, json))
    }

    fn open(&mut self, sink: &mut Sink) {
        if !std::mem::replace(&mut self.quoted, true) {
            sink.arguments("\"");
        }
    }

    pub(super) fn end(&mut self, sink: &mut Sink) {
        let text = std::mem::take(&mut self.held);
        let text = match text.strip_suffix('\n') {
            Some(text) if self.framed => text,
            _ => &text,
        };
        if let Some(json) = self.json(text) {
            sink.arguments(json);
            return;
        }
        self.open(sink);
        sink.arguments(&escaped(text));
        sink.arguments("\"");
    }

    /// The value, if it is no string.
    fn json<'a>(&self, text: &'a str) -> Option<&'a str> {
        match self.kind {
            Kind::Literal(_) => {
                let text = text.trim_matches([' ', '\t', '\r', '\n']);
                let mut literals = self.literals();
                literals
                    .find(|(word, _)| *word == text)
                    .map(|(_, json)| json)
            }
            Kind::Json => {
                let parsed: Value = serde_json::from_str(text).ok()?;
                self.types.has(Types::of(&parsed)).then_some(text)
            }
            Kind::Blank | Kind::String => None,
        }
    }
}

/// The inside of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
