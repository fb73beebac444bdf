//! A request body whose fields are taken one by one; what nobody took is unknown.

use octavo_grammar::constraint::{self, Given};
use serde_json::{Map, Number, Value};

use crate::config::UnknownFields;
use crate::error::ApiError;
use crate::log::say;

/// Entries of a list at most, where nothing else bounds it.
pub(crate) const MAX_LIST_ENTRIES: usize = 1024;
/// Characters of all strings of a list together at most.
const MAX_LIST_CHARS: usize = 1 << 16;

/// Fields that clients send to a service: accounts, storage, routing, hints of speed or length. They mean nothing to an engine of one's own.
pub const FIELDS_WITHOUT_MEANING: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "verbosity",
];

/// The fields that are left of a JSON object; `null` means "not given" everywhere.
#[derive(Debug)]
pub(crate) struct Body {
    fields: Map<String, Value>,
    /// What comes before names in errors.
    prefix: String,
}

impl Body {
    /// The object in a request's bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::invalid(format!("the body is no valid JSON: {error}")))?;
        match value {
            Value::Object(fields) => Ok(Self {
                fields,
                prefix: String::new(),
            }),
            other => Err(ApiError::field("body", "a JSON object", &other)),
        }
    }

    /// An object inside a body.
    pub(crate) fn inner(name: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self {
                fields,
                prefix: format!("{name}."),
            }),
            other => Err(ApiError::field(name, "an object", &other)),
        }
    }

    /// Takes a field; none if it is absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields
            .shift_remove(name)
            .filter(|value| !value.is_null())
    }

    /// A field that is left where it is; null if it is absent.
    pub(crate) fn get(&self, name: &str) -> &Value {
        self.fields.get(name).unwrap_or(&Value::Null)
    }

    /// Whether a field is given.
    pub(crate) fn has(&self, name: &str) -> bool {
        !self.get(name).is_null()
    }

    /// Lets a field be known by another name, unless that is a field of its own.
    pub(crate) fn rename(&mut self, from: &str, to: &str) -> Result<(), ApiError> {
        if let Some(value) = self.take(to) {
            return Err(self.wrong(to, &format!("left out: it is called '{from}' here"), &value));
        }
        if let Some(value) = self.take(from) {
            self.fields.insert(to.to_owned(), value);
        }
        Ok(())
    }

    fn wrong(&self, name: &str, allowed: &str, value: &Value) -> ApiError {
        ApiError::field(&format!("{}{name}", self.prefix), allowed, value)
    }

    /// An integer from `low` to `high`.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        low: i64,
        high: i64,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_number().and_then(whole) {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            Some(_) => Err(self.wrong(name, &format!("from {low} to {high}"), &value)),
            None => Err(self.wrong(name, "an integer", &value)),
        }
    }

    /// A number as the engine will see it; its range is checked with all others.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => Err(self.wrong(name, "a number", &value)),
        }
    }

    /// True or false.
    pub(crate) fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(value) => Err(self.wrong(name, "true or false", &value)),
        }
    }

    /// A text.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(name, "a string", &value)),
        }
    }

    /// A list.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(value) => Err(self.wrong(name, "a list", &value)),
        }
    }

    /// A list of texts that are not empty, or one of them.
    pub(crate) fn strings(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let list = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        self.limit_entries(name, list.len(), MAX_LIST_ENTRIES)?;
        let mut strings = Vec::with_capacity(list.len());
        for value in list {
            match value {
                Value::String(text) if !text.is_empty() => strings.push(text),
                other => return Err(self.wrong(name, "non-empty strings", &other)),
            }
        }
        let characters: usize = strings.iter().map(|text| text.chars().count()).sum();
        if characters > MAX_LIST_CHARS {
            let allowed = format!("at most {MAX_LIST_CHARS} characters in all");
            return Err(self.wrong(name, &allowed, &characters.into()));
        }
        Ok(strings)
    }

    /// A list of token ids; the vocabulary is checked later.
    pub(crate) fn token_ids(
        &mut self,
        name: &str,
        most: usize,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        self.limit_entries(name, list.len(), most)?;
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| self.wrong(name, "token ids", value))
        };
        list.iter().map(id).collect::<Result<_, _>>().map(Some)
    }

    pub(crate) fn limit_entries(
        &self,
        name: &str,
        count: usize,
        most: usize,
    ) -> Result<(), ApiError> {
        if count > most {
            let allowed = format!("at most {most} entries");
            return Err(self.wrong(name, &allowed, &Value::from(format!("{count} entries"))));
        }
        Ok(())
    }

    /// A field that may only have values which ask for nothing.
    pub(crate) fn unsupported(
        &mut self,
        name: &str,
        harmless: &[Value],
        allowed: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !harmless.contains(&value) => Err(self.wrong(name, allowed, &value)),
            _ => Ok(()),
        }
    }

    /// Takes the fields that constrain the output.
    pub(crate) fn constraint(&mut self) -> Result<Option<Given>, ApiError> {
        Ok(constraint::take(&mut self.fields)?)
    }

    /// Ends the reading: fields that are left are unknown.
    pub(crate) fn finish(mut self, unknown: UnknownFields) -> Result<(), ApiError> {
        for name in FIELDS_WITHOUT_MEANING {
            self.fields.shift_remove(*name);
        }
        match (self.fields.iter().next(), unknown) {
            (None, _) => Ok(()),
            (Some((name, value)), UnknownFields::Reject) => {
                Err(self.wrong(name, "left out: there is no such field", value))
            }
            (Some(_), UnknownFields::Warn) => {
                let names: Vec<String> = self
                    .fields
                    .keys()
                    .map(|name| crate::error::shorten(name))
                    .collect();
                say(&format!(
                    "a request has unknown fields: {}",
                    names.join(", ")
                ));
                Ok(())
            }
        }
    }
}

/// The value of an integer; also of `1.0`, which some clients write.
fn whole(number: &Number) -> Option<i64> {
    if let Some(integer) = number.as_i64() {
        return Some(integer);
    }
    if number.is_u64() {
        return Some(i64::MAX);
    }
    let float = number.as_f64()?;
    (float.fract() == 0.0 && float.abs() < 2f64.powi(53)).then_some(float as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(value: &Value) -> Body {
        Body::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn integers_are_integers() {
        let mut fields = body(
            &json!({"a": 3, "b": 3.0, "c": null, "d": true, "e": 2.5, "f": 1u64 << 63, "g": "3", "h": 9}),
        );
        assert_eq!(fields.integer("a", 0, 8).unwrap(), Some(3));
        assert_eq!(fields.integer("b", 0, 8).unwrap(), Some(3));
        assert_eq!(fields.integer("c", 0, 8).unwrap(), None);
        for name in ["d", "e", "f", "g", "h"] {
            let error = fields.integer(name, 0, 8).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }

    #[test]
    fn an_unknown_field_is_named_and_one_without_meaning_is_not() {
        let mut fields = body(&json!({"known": 1, "user": "me", "strange": 2}));
        fields.take("known");
        let error = fields.finish(UnknownFields::Reject).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("strange"));
        assert!(
            body(&json!({"user": "me", "x": null, "y": 1}))
                .finish(UnknownFields::Warn)
                .is_ok()
        );
    }

    #[test]
    fn lists_are_bounded_and_strings_not_empty() {
        for (value, fits) in [
            (json!("a"), true),
            (json!(["a", "b"]), true),
            (json!([]), true),
            (json!(["a", ""]), false),
            (json!(""), false),
            (json!([1]), false),
            (json!(vec!["a"; MAX_LIST_ENTRIES + 1]), false),
            (json!(["a".repeat(MAX_LIST_CHARS + 1)]), false),
        ] {
            assert_eq!(
                body(&json!({"stop": value})).strings("stop").is_ok(),
                fits,
                "{value}"
            );
        }
        let ids = |value: Value| body(&json!({"ids": value})).token_ids("ids", 4);
        assert_eq!(ids(json!([0, 7])).unwrap(), Some(vec![0, 7]));
        for wrong in [
            json!([-1]),
            json!([1u64 << 40]),
            json!([1.5]),
            json!([true]),
            json!([1, 2, 3, 4, 5]),
            json!(3),
        ] {
            assert!(ids(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_body_that_is_no_object_or_too_deep_is_refused() {
        for wrong in [
            "",
            "[1]",
            "{\"a\": 1e999}",
            "{\"a\": NaN}",
            "{\"a\": \"\\ud800\"}",
        ] {
            assert!(Body::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(Body::parse(deep.as_bytes()).is_err());
    }
}
