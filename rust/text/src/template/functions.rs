//! What templates may call besides the language itself, with the meaning it has in transformers.

use std::borrow::Cow;
use std::fmt;

use jiff::Zoned;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Value;

/// The message of a template's own `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.set_unknown_method_callback(call_method);
}

/// Python's white space: Unicode's, and four control characters that separate files, groups, records and units.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// jinja2's `trim`, which is Python's `str.strip`.
fn trim(text: Cow<'_, str>, chars: Option<Cow<'_, str>>) -> String {
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    }
}

/// Python's methods of values; those that strip white space mean Python's.
fn call_method(
    state: &State<'_, '_>,
    value: &minijinja::Value,
    method: &str,
    args: &[minijinja::Value],
) -> Result<minijinja::Value, Error> {
    if let (Some(text), []) = (value.as_str(), args) {
        match method {
            "strip" => return Ok(text.trim_matches(is_space).into()),
            "lstrip" => return Ok(text.trim_start_matches(is_space).into()),
            "rstrip" => return Ok(text.trim_end_matches(is_space).into()),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// The local time by a `strftime` format.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &Zoned::now()).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {error}"),
        )
    })
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False, indent=indent)` writes it, without HTML escapes.
fn tojson(value: minijinja::Value, indent: Option<usize>, kwargs: Kwargs) -> Result<String, Error> {
    let indent = indent.or(kwargs.get::<Option<usize>>("indent")?);
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "tojson: not a JSON value").with_source(error)
    })?;
    let mut writer = PythonJson {
        out: String::new(),
        indent,
        ensure_ascii,
        sort_keys,
    };
    writer.write(&value, 0);
    Ok(writer.out)
}

struct PythonJson {
    out: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl PythonJson {
    fn write(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => self.out.push_str(&python_number(number)),
            Value::String(text) => self.string(text),
            Value::Array(values) => {
                self.list('[', ']', depth, values.iter(), |json, value| {
                    json.write(value, depth + 1)
                });
            }
            Value::Object(fields) => {
                let mut fields: Vec<(&String, &Value)> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|(name, _)| *name);
                }
                self.list(
                    '{',
                    '}',
                    depth,
                    fields.into_iter(),
                    |json, (name, value)| {
                        json.string(name);
                        json.out.push_str(": ");
                        json.write(value, depth + 1);
                    },
                );
            }
        }
    }

    fn list<I: ExactSizeIterator>(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: I,
        mut write: impl FnMut(&mut Self, I::Item),
    ) {
        self.out.push(open);
        let empty = items.len() == 0;
        for (i, item) in items.enumerate() {
            if i > 0 {
                self.out
                    .push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.new_line(depth + 1);
            write(self, item);
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out
                .extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's `repr` of a number: exponents from 1e16 and below 1e-4, with a sign and at least two digits.
fn python_number(number: &serde_json::Number) -> String {
    let Some(value) = number.as_f64().filter(|_| number.is_f64()) else {
        return number.to_string();
    };
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (mantissa, exponent) = text
            .split_once('e')
            .expect("invariant: {:e} writes an exponent");
        let (sign, digits) = exponent
            .strip_prefix('-')
            .map_or(('+', exponent), |digits| ('-', digits));
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    format!("{value:?}")
}
