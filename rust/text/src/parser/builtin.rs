//! Calls of Llama 3's built-in tools: `NAME.call(KEY="value", …)`, in the manner of Python.
//!
//! Values are quoted strings, numbers and literals. A quoted value of a parameter that can be no string, by the tool's
//! schema, is read as what it can be.

use std::sync::Arc;

use serde_json::{Number, Value};

use super::call::Progress;
use super::header::is_name;
use super::markers::leading_space;
use super::schema::{ToolSchemas, Types};
use super::sink::Sink;
use super::value::{ParameterValue, escaped};

const CALL: &str = ".call";
/// Names, and values that are not quoted, are no longer than this.
const MAX_NAME_BYTES: usize = 512;

#[derive(Debug)]
enum State {
    /// In front of `(`.
    Name,
    /// In front of a key or `)`.
    Key(String),
    /// Behind a key and white space.
    Equals(String),
    /// Behind `=`.
    Begin(Types),
    /// Inside quotation marks; the flag is set behind a backslash.
    Quoted(ParameterValue, char, bool),
    Bare(String, Types),
    /// In front of `,` or `)`.
    After,
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct BuiltinCall {
    schemas: Arc<ToolSchemas>,
    state: State,
    /// What stands in front of the call and its name so far: content, if it is no call.
    held: String,
    marker: usize,
    name: String,
    /// Whether there was a parameter.
    any: bool,
}

impl BuiltinCall {
    /// `marker` is what stands in front of the name: content, if no call follows.
    pub(super) fn new(marker: &str, schemas: Arc<ToolSchemas>) -> Self {
        Self {
            schemas,
            state: State::Name,
            held: marker.to_owned(),
            marker: marker.len(),
            name: String::new(),
            any: false,
        }
    }

    pub(super) fn push(&mut self, text: &str, sink: &mut Sink) -> Progress {
        let mut at = 0;
        while let Some(character) = text[at..].chars().next() {
            let space = self.space(&text[at..]) + self.plain(&text[at..], sink);
            if space > 0 {
                at += space;
                continue;
            }
            let end = at + character.len_utf8();
            match self.take(character, sink) {
                Taken::More => at = end,
                Taken::Again => {}
                Taken::Done => return Progress::Done(end),
                Taken::Broken => return Progress::Broken(at),
            }
        }
        Progress::More
    }

    /// White space that means nothing here.
    fn space(&mut self, text: &str) -> usize {
        let space = leading_space(text);
        match &mut self.state {
            State::Name | State::Quoted(..) | State::Bare(..) => return 0,
            State::Key(key) if space > 0 && !key.is_empty() => {
                self.state = State::Equals(std::mem::take(key));
            }
            _ => {}
        }
        space
    }

    /// Takes the plain characters of a quoted value, all at once.
    fn plain(&mut self, text: &str, sink: &mut Sink) -> usize {
        let State::Quoted(value, quote, false) = &mut self.state else {
            return 0;
        };
        let end = text.find([*quote, '\\']).unwrap_or(text.len());
        value.add(&text[..end], sink);
        end
    }

    /// The text ended inside the call.
    pub(super) fn finish(&mut self, sink: &mut Sink) {
        self.broken(sink);
    }

    fn broken(&mut self, sink: &mut Sink) -> Taken {
        if matches!(self.state, State::Name) {
            sink.content(&self.held);
        } else {
            sink.end(false);
        }
        Taken::Broken
    }

    fn take(&mut self, character: char, sink: &mut Sink) -> Taken {
        match (&mut self.state, character) {
            (State::Name, '(') => return self.named(sink),
            (State::Name, _) => {
                let fits = is_name(character.encode_utf8(&mut [0; 4]));
                if !fits || self.held.len() - self.marker >= MAX_NAME_BYTES {
                    return self.broken(sink);
                }
                self.held.push(character);
            }
            (State::Key(key), ')') if key.is_empty() => return self.done(sink),
            (State::Key(key) | State::Equals(key), '=') if !key.is_empty() => {
                let separator = if self.any { ", " } else { "{" };
                sink.arguments(&format!("{separator}\"{}\": ", escaped(key)));
                self.any = true;
                self.state = State::Begin(self.schemas.types(&self.name, key));
            }
            (State::Key(key), 'a'..='z' | 'A'..='Z' | '0'..='9' | '_')
                if key.len() < MAX_NAME_BYTES =>
            {
                key.push(character);
            }
            (State::Begin(types), '"' | '\'') => {
                let types = if types.has(Types::STRING) {
                    Types::STRING
                } else {
                    *types
                };
                let value = ParameterValue::new(types, false);
                self.state = State::Quoted(value, character, false);
            }
            (State::Begin(types), _) => {
                self.state = State::Bare(String::new(), *types);
                return Taken::Again;
            }
            (State::Quoted(value, quote, escape), _) => {
                if *escape {
                    *escape = false;
                    value.add(&unescaped(character), sink);
                } else if character == '\\' {
                    *escape = true;
                } else {
                    debug_assert_eq!(character, *quote, "the others are plain");
                    value.end(sink);
                    self.state = State::After;
                }
            }
            (State::Bare(..), ',' | ')' | ' ' | '\n' | '\t' | '\r') => return self.bare(sink),
            (State::Bare(held, _), _) if held.len() < MAX_NAME_BYTES => held.push(character),
            (State::After, ',') => self.state = State::Key(String::new()),
            (State::After, ')') => return self.done(sink),
            _ => return self.broken(sink),
        }
        Taken::More
    }

    fn named(&mut self, sink: &mut Sink) -> Taken {
        let name = self.held[self.marker..].strip_suffix(CALL);
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return self.broken(sink);
        };
        self.name = name.to_owned();
        sink.start(self.name.clone());
        self.state = State::Key(String::new());
        Taken::More
    }

    /// Ends a value without quotation marks.
    fn bare(&mut self, sink: &mut Sink) -> Taken {
        let State::Bare(held, types) = &self.state else {
            return Taken::Again;
        };
        let json = match held.as_str() {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number if serde_json::from_str::<Number>(number).is_ok() => number,
            _ => return self.broken(sink),
        };
        // What the schema allows as a string only is one as the model wrote it.
        let allowed =
            serde_json::from_str::<Value>(json).is_ok_and(|value| types.has(Types::of(&value)));
        if allowed || !types.has(Types::STRING) {
            sink.arguments(json);
        } else {
            sink.arguments(&format!("\"{}\"", escaped(held)));
        }
        self.state = State::After;
        Taken::Again
    }

    fn done(&self, sink: &mut Sink) -> Taken {
        sink.arguments(if self.any { "}" } else { "{}" });
        sink.end(true);
        Taken::Done
    }
}

/// What became of a character.
enum Taken {
    More,
    /// The state has changed, the character is still to be read.
    Again,
    Done,
    Broken,
}

/// What a character behind a backslash stands for; of those that mean nothing, the backslash stays.
fn unescaped(character: char) -> String {
    match character {
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        'r' => "\r".to_owned(),
        '"' | '\'' | '\\' => character.to_string(),
        _ => format!("\\{character}"),
    }
}
