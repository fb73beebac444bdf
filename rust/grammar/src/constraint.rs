//! What users may ask of an output, by the fields they ask with, and the grammar that it is.

use octavo_wire::{GrammarPart, Syntax};
use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::lark;

/// Entries of a choice at most.
const MAX_CHOICES: usize = 1024;
/// White space between two tokens of JSON is no longer than this: a model must not fill its budget with it.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";
/// Keys of a schema that ask for nothing.
const ANNOTATIONS: &[&str] = &[
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "$defs",
    "definitions",
    "x-guidance",
];
/// The body's fields of the older form, and what they are called in `structured_outputs`.
const GUIDED: [(&str, &str); 4] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
];

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{param} must be {allowed}")]
pub struct FieldError {
    /// Name of the field.
    pub param: String,
    /// What it may be.
    pub allowed: String,
    /// What it is.
    pub value: Value,
}

impl FieldError {
    pub(crate) fn new(param: impl Into<String>, allowed: &str, value: &Value) -> Self {
        Self {
            param: param.into(),
            allowed: allowed.to_owned(),
            value: value.clone(),
        }
    }
}

/// What an output must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// JSON that a schema allows.
    Json(Value),
    /// A match of a regular expression, whole.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A text of a grammar in llguidance's Lark.
    Lark(String),
}

/// A constraint, and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// Name of the field.
    pub param: String,
    /// What it asks for.
    pub constraint: Constraint,
}

/// Takes `response_format`, `structured_outputs` and `guided_*` out of a body; `null` is not given.
///
/// # Errors
/// A field is wrong, or two of them ask for something.
pub fn take(fields: &mut Map<String, Value>) -> Result<Option<Given>, FieldError> {
    let mut take = |name: &str| fields.shift_remove(name).filter(|value| !value.is_null());
    let mut found: Option<Given> = None;
    let mut keep = |given: Given, value: &Value| match &found {
        Some(other) => {
            let allowed = format!("left out beside '{}'", other.param);
            Err(FieldError::new(given.param, &allowed, value))
        }
        None => {
            found = Some(given);
            Ok(())
        }
    };
    if let Some(value) = take("response_format")
        && let Some(given) = response_format("response_format", &value)?
    {
        keep(given, &value)?;
    }
    if let Some(value) = take("structured_outputs") {
        keep(structured_outputs(&value)?, &value)?;
    }
    for (name, kind) in GUIDED {
        if let Some(value) = take(name) {
            let constraint = Constraint::of(kind, name, &value)?;
            let param = name.to_owned();
            keep(Given { param, constraint }, &value)?;
        }
    }
    Ok(found)
}

/// The value of `response_format`: `text`, `json_object` or `json_schema`; none for text. `param` is the field's name.
///
/// # Errors
/// It is of another form.
pub fn response_format(param: &str, value: &Value) -> Result<Option<Given>, FieldError> {
    let wrong = |name: &str, allowed: &str, value: &Value| {
        FieldError::new(format!("{param}{name}"), allowed, value)
    };
    let constraint = match value["type"].as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => Constraint::object(),
        Some("json_schema") => {
            // The Responses protocol has no object inside the object.
            let (inner, name) = match &value["json_schema"] {
                Value::Null => (value, ""),
                inner => (inner, ".json_schema"),
            };
            if !inner["name"].is_string() {
                return Err(wrong(&format!("{name}.name"), "a string", &inner["name"]));
            }
            Constraint::of("json", &format!("{param}{name}.schema"), &inner["schema"])?
        }
        _ => {
            return Err(wrong(
                "",
                "of type 'text', 'json_object' or 'json_schema'",
                value,
            ));
        }
    };
    let param = param.to_owned();
    Ok(Some(Given { param, constraint }))
}

/// The value of `structured_outputs`: an object with exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.
///
/// # Errors
/// It is of another form.
pub fn structured_outputs(value: &Value) -> Result<Given, FieldError> {
    const NAME: &str = "structured_outputs";
    let allowed =
        "an object with exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'";
    let fields = value
        .as_object()
        .ok_or_else(|| FieldError::new(NAME, allowed, value))?;
    let mut given = fields.iter().filter(|(_, value)| !value.is_null());
    let (Some((kind, inner)), None) = (given.next(), given.next()) else {
        return Err(FieldError::new(NAME, allowed, value));
    };
    let param = format!("{NAME}.{kind}");
    let constraint = Constraint::of(kind, &param, inner)?;
    Ok(Given { param, constraint })
}

impl Constraint {
    /// Any JSON object.
    fn object() -> Self {
        Self::Json(json!({"type": "object"}))
    }

    fn of(kind: &str, param: &str, value: &Value) -> Result<Self, FieldError> {
        let wrong = |allowed: &str| FieldError::new(param, allowed, value);
        match kind {
            "json" => schema(value)
                .map(Self::Json)
                .ok_or_else(|| wrong("a JSON schema: an object, or its text")),
            "json_object" if *value == true => Ok(Self::object()),
            "json_object" => Err(wrong("true or left out")),
            "regex" => match value.as_str().filter(|text| !ends_escaped(text)) {
                Some(text) => Ok(Self::Regex(text.to_owned())),
                None => Err(wrong("a regular expression")),
            },
            "grammar" => match value.as_str().filter(|text| !text.trim().is_empty()) {
                Some(text) => Ok(Self::Lark(text.to_owned())),
                None => Err(wrong("a grammar in Lark's form")),
            },
            "choice" => {
                let texts = value
                    .as_array()
                    .filter(|texts| (1..=MAX_CHOICES).contains(&texts.len()));
                let texts = texts.into_iter().flatten().map(Value::as_str);
                let texts: Option<Vec<String>> = texts
                    .map(|text| text.filter(|t| !t.is_empty()).map(str::to_owned))
                    .collect();
                match texts.filter(|texts| !texts.is_empty()) {
                    Some(texts) => Ok(Self::Choice(texts)),
                    None => Err(wrong(&format!(
                        "a list of 1 to {MAX_CHOICES} non-empty strings"
                    ))),
                }
            }
            _ => Err(wrong("left out: there is no such field")),
        }
    }

    /// The one field of `structured_outputs` that asks for this.
    #[must_use]
    pub fn to_options(&self) -> Value {
        match self {
            Self::Json(schema) => json!({"json": schema}),
            Self::Regex(text) => json!({"regex": text}),
            Self::Choice(texts) => json!({"choice": texts}),
            Self::Lark(text) => json!({"grammar": text}),
        }
    }

    /// The grammar under a name.
    #[must_use]
    pub fn part(&self, name: &str) -> GrammarPart {
        let (syntax, text) = match self {
            Self::Json(schema) => (Syntax::JsonSchema, bounded(schema).to_string()),
            Self::Regex(text) => (Syntax::Lark, expression(text)),
            Self::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| lark::literal(text)).collect();
                (
                    Syntax::Lark,
                    format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | ")),
                )
            }
            Self::Lark(text) => (Syntax::Lark, text.clone()),
        };
        GrammarPart {
            name: name.to_owned(),
            syntax,
            text,
        }
    }
}

/// A schema, given as such or as its text. One that asks for nothing asks for an object: a number alone would never have to end.
fn schema(value: &Value) -> Option<Value> {
    let parsed: Value;
    let value = match value {
        Value::String(text) => {
            parsed = serde_json::from_str(text).ok()?;
            &parsed
        }
        other => other,
    };
    let mut schema = match value {
        Value::Object(schema) => schema.clone(),
        Value::Bool(true) => Map::new(),
        _ => return None,
    };
    if schema.keys().all(|key| ANNOTATIONS.contains(&key.as_str())) {
        schema.insert("type".to_owned(), "object".into());
    }
    Some(Value::Object(schema))
}

/// A schema whose white space is bounded, unless it says otherwise itself.
pub(crate) fn bounded(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(fields) = &mut schema {
        let options = fields.entry("x-guidance").or_insert_with(|| json!({}));
        if let Value::Object(options) = options
            && !options.contains_key("whitespace_pattern")
            && !options.contains_key("whitespace_flexible")
        {
            options.insert("whitespace_pattern".to_owned(), WHITE_SPACE.into());
        }
    }
    schema
}

/// The rule of a regular expression. It matches whole outputs, so that anchors at its ends say nothing.
fn expression(text: &str) -> String {
    let text = text.strip_prefix('^').unwrap_or(text);
    let text = match text.strip_suffix('$') {
        Some(inner) if !ends_escaped(inner) => inner,
        _ => text,
    };
    if text.is_empty() {
        return "start: \"\"\n".to_owned();
    }
    format!("start: /{}/\n", llguidance::regex_to_lark(text, ""))
}

/// Whether the next character would be escaped.
fn ends_escaped(text: &str) -> bool {
    (text.len() - text.trim_end_matches('\\').len()) % 2 == 1
}
