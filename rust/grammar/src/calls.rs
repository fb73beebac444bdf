//! Forced tool calls: which tools a request may call or must call, and the grammar of the calls in each format.

use octavo_text::Tokenizer;
use octavo_wire::{GrammarPart, Syntax};
use serde_json::{Map, Value, json};

use crate::constraint::{FieldError, bounded};
use crate::lark::{literal, marker};

/// What `tools` and `tool_choice` come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The tools that the model is told of.
    pub told: Vec<Value>,
    /// Whether it must call.
    pub force: Option<Force>,
}

/// How a call is forced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Force {
    /// Any tool of those told.
    Required,
    /// The tool of this name, once.
    Named(String),
}

/// Checks `tools` and resolves `tool_choice`: `auto`, `none`, `required`, one function, or `allowed_tools`.
///
/// # Errors
/// A tool has no name or no schema of an object, or the choice names none of them.
pub fn choose(tools: Vec<Value>, choice: Option<&Value>) -> Result<Choice, FieldError> {
    const NAME: &str = "tool_choice";
    for (i, tool) in tools.iter().enumerate() {
        check_tool(i, tool)?;
    }
    let auto = Value::from("auto");
    let choice = choice.unwrap_or(&auto);
    let wrong = |allowed: &str| FieldError::new(NAME, allowed, choice);
    let (kind, inner) = match choice {
        Value::String(kind) => (kind.as_str(), &Value::Null),
        // The Responses protocol has no object inside the object.
        Value::Object(fields) => {
            let kind = fields
                .get("type")
                .and_then(Value::as_str)
                .unwrap_or_default();
            (
                kind,
                fields
                    .get(kind)
                    .filter(|inner| inner.is_object())
                    .unwrap_or(choice),
            )
        }
        _ => ("", &Value::Null),
    };
    let (told, force) = match (kind, choice.is_object()) {
        ("none", false) => (Vec::new(), None),
        ("auto", false) => (tools, None),
        ("required", false) => (tools, Some(Force::Required)),
        ("function", true) => {
            let name = inner["name"].as_str().unwrap_or_default().to_owned();
            if !tools.iter().any(|tool| name_of(tool) == name) {
                return Err(wrong("a function of 'tools'"));
            }
            (tools, Some(Force::Named(name)))
        }
        ("allowed_tools", true) => {
            let force = match inner["mode"].as_str() {
                Some("auto") => None,
                Some("required") => Some(Force::Required),
                _ => {
                    return Err(wrong(
                        "an 'allowed_tools' whose 'mode' is 'auto' or 'required'",
                    ));
                }
            };
            (
                allowed(tools, inner)
                    .ok_or_else(|| wrong("an 'allowed_tools' of functions of 'tools'"))?,
                force,
            )
        }
        _ => {
            return Err(wrong(
                "'auto', 'none', 'required', a function, or 'allowed_tools'",
            ));
        }
    };
    if force.is_some() && told.is_empty() {
        return Err(wrong("'auto' or 'none' without 'tools'"));
    }
    Ok(Choice { told, force })
}

fn check_tool(i: usize, tool: &Value) -> Result<(), FieldError> {
    let param = format!("tools[{i}]");
    if tool["type"] != "function" || name_of(tool).is_empty() {
        let allowed = "an object of type 'function' whose 'function' has a name";
        return Err(FieldError::new(param, allowed, tool));
    }
    let parameters = &tool["function"]["parameters"];
    if !parameters.is_null() && !parameters.is_object() {
        let param = format!("{param}.function.parameters");
        return Err(FieldError::new(param, "a JSON Schema object", parameters));
    }
    Ok(())
}

fn name_of(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// The tools that `allowed_tools` names, in their order; none if it names another one, or none at all.
fn allowed(tools: Vec<Value>, inner: &Value) -> Option<Vec<Value>> {
    let names = inner["tools"].as_array()?.iter().map(|tool| {
        let name = tool["function"]["name"]
            .as_str()
            .or(tool["name"].as_str())?;
        tools
            .iter()
            .any(|known| name_of(known) == name)
            .then_some(name)
    });
    let names: Vec<&str> = names.collect::<Option<_>>()?;
    let kept = tools.iter().filter(|tool| names.contains(&name_of(tool)));
    Some(kept.cloned().collect::<Vec<_>>()).filter(|kept| !kept.is_empty())
}

/// The grammar of calls: a rule named `calls` and what it refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calls {
    pub(crate) rules: String,
    pub(crate) parts: Vec<GrammarPart>,
}

impl Calls {
    /// Calls of `tools` as the tool parser of that name reads them; `force` leaves one of them, and one call. None if the format cannot be written as a grammar.
    #[must_use]
    pub fn new(
        parser: &str,
        tools: &[Value],
        force: Option<&Force>,
        several: bool,
        tokenizer: &Tokenizer,
    ) -> Option<Self> {
        let syntax = CallSyntax::of(parser, tokenizer)?;
        let named = match force {
            Some(Force::Named(name)) => Some(name.as_str()),
            _ => None,
        };
        let mut calls = Self {
            rules: String::new(),
            parts: Vec::new(),
        };
        let mut alternatives = Vec::new();
        let chosen = tools
            .iter()
            .filter(|tool| named.is_none_or(|name| name == name_of(tool)));
        for (i, tool) in chosen.enumerate() {
            let arguments = format!("arguments_{i}");
            alternatives.push((syntax.call)(name_of(tool), &format!("@{arguments}")));
            calls.parts.push(GrammarPart {
                name: arguments,
                syntax: Syntax::JsonSchema,
                text: bounded(&object(&tool["function"]["parameters"])).to_string(),
            });
        }
        let more = match (&syntax.between, named) {
            (Some(between), None) if several => format!(" ({between} call)*"),
            _ => String::new(),
        };
        let (begin, end) = (&syntax.begin, &syntax.end);
        calls.rules = format!(
            "calls: {begin} call{more} {end}\ncall: {}\n",
            alternatives.join("\n    | ")
        );
        Some(calls)
    }
}

/// The schema of arguments: always of an object.
fn object(parameters: &Value) -> Value {
    let mut schema = match parameters {
        Value::Object(schema) => schema.clone(),
        _ => Map::from_iter([("additionalProperties".to_owned(), json!(false))]),
    };
    schema.entry("type").or_insert_with(|| "object".into());
    Value::Object(schema)
}

/// One call in Lark, of a name and a rule for its arguments.
type CallRule = Box<dyn Fn(&str, &str) -> String>;

/// How a format writes calls, in Lark.
struct CallSyntax {
    begin: String,
    call: CallRule,
    /// What separates calls; none if a message has one call only.
    between: Option<String>,
    end: String,
}

impl CallSyntax {
    fn of(parser: &str, tokenizer: &Tokenizer) -> Option<Self> {
        let mark = |text: &str| marker(tokenizer, text);
        Some(match parser {
            "hermes" => {
                let (open, close) = (mark("<tool_call>"), mark("</tool_call>"));
                Self {
                    begin: String::new(),
                    call: Box::new(move |name, arguments| {
                        let object = json_object(name, "arguments", arguments);
                        format!("{open} \"\\n\" {object} \"\\n\" {close}")
                    }),
                    between: Some("\"\\n\"".to_owned()),
                    end: String::new(),
                }
            }
            "llama3_json" => Self {
                begin: String::new(),
                call: Box::new(|name, arguments| json_object(name, "parameters", arguments)),
                between: Some("\"; \"".to_owned()),
                end: String::new(),
            },
            "mistral" => Self::mistral(tokenizer),
            "deepseek_v3" => Self::deepseek(tokenizer),
            "harmony" => {
                let [channel, constrain, message] =
                    ["<|channel|>", "<|constrain|>", "<|message|>"].map(mark);
                Self {
                    begin: String::new(),
                    call: Box::new(move |name, arguments| {
                        let header = literal(&format!("commentary to=functions.{name} "));
                        format!("{channel} {header} {constrain} \"json\" {message} {arguments}")
                    }),
                    // A message to a tool ends the turn.
                    between: None,
                    end: String::new(),
                }
            }
            _ => return None,
        })
    }

    /// Since version 11 of its tokenizer the name stands in front of the arguments, before that inside a list.
    fn mistral(tokenizer: &Tokenizer) -> Self {
        let open = marker(tokenizer, "[TOOL_CALLS]");
        if tokenizer.token_to_id("[ARGS]").is_none() {
            return Self {
                begin: format!("{open} \"[\""),
                call: Box::new(|name, arguments| json_object(name, "arguments", arguments)),
                between: Some("\", \"".to_owned()),
                end: "\"]\"".to_owned(),
            };
        }
        let args = marker(tokenizer, "[ARGS]");
        Self {
            begin: String::new(),
            call: Box::new(move |name, arguments| {
                format!("{open} {} {args} {arguments}", literal(name))
            }),
            between: Some(String::new()),
            end: String::new(),
        }
    }

    /// V3 and R1 write the arguments as a block of code, V3.1 bare; the model chooses.
    fn deepseek(tokenizer: &Tokenizer) -> Self {
        let mark = |text| marker(tokenizer, text);
        let [open, close, separator] = [
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ]
        .map(mark);
        Self {
            begin: mark("<｜tool▁calls▁begin｜>"),
            call: Box::new(move |name, arguments| {
                let fenced = literal(&format!("{name}\n```json\n"));
                let name = literal(name);
                format!(
                    "{open} (\"function\" {separator} {fenced} {arguments} \"\\n```\" | {name} {separator} {arguments}) {close}"
                )
            }),
            between: Some("\"\\n\"?".to_owned()),
            end: mark("<｜tool▁calls▁end｜>"),
        }
    }
}

/// `{"name": NAME, KEY: ARGUMENTS}`.
fn json_object(name: &str, key: &str, arguments: &str) -> String {
    let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(name));
    format!("{} {arguments} \"}}\"", literal(&head))
}
