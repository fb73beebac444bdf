//! What the tools of a request say of their parameters, for formats that write values without types.

use std::collections::HashMap;

use serde_json::Value;

/// A set of JSON types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    pub(super) const STRING: Self = Self(1);
    pub(super) const NUMBER: Self = Self(2);
    pub(super) const BOOLEAN: Self = Self(4);
    pub(super) const NULL: Self = Self(8);
    pub(super) const OBJECT: Self = Self(16);
    pub(super) const LIST: Self = Self(32);
    /// Nothing is known.
    pub(super) const ANY: Self = Self(63);

    /// Whether all types of `other` are in the set.
    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The type of a value.
    pub(super) fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::LIST,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// What a JSON Schema allows, as far as its `type`, `enum`, `const`, `anyOf`, `oneOf` and `nullable` say.
    fn of_schema(schema: &Value) -> Self {
        let known = if let Some(kind) = schema.get("type") {
            match kind {
                Value::Array(kinds) => Self::union(kinds.iter().map(Self::named)),
                kind => Self::named(kind),
            }
        } else if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            Self::union(values.iter().map(Self::of))
        } else if let Some(value) = schema.get("const") {
            Self::of(value)
        } else if let Some(Value::Array(options)) =
            schema.get("anyOf").or_else(|| schema.get("oneOf"))
        {
            Self::union(options.iter().map(Self::of_schema))
        } else {
            Self::ANY
        };
        match schema.get("nullable") {
            Some(Value::Bool(true)) => Self::union([known, Self::NULL].into_iter()),
            _ => known,
        }
    }

    fn named(name: &Value) -> Self {
        match name.as_str() {
            Some("string") => Self::STRING,
            Some("number" | "integer") => Self::NUMBER,
            Some("boolean") => Self::BOOLEAN,
            Some("null") => Self::NULL,
            Some("object") => Self::OBJECT,
            Some("array") => Self::LIST,
            _ => Self::ANY,
        }
    }

    /// All types of the sets; of none, nothing is known.
    fn union(sets: impl Iterator<Item = Self>) -> Self {
        let joined = sets.fold(0, |all, set| all | set.0);
        if joined == 0 { Self::ANY } else { Self(joined) }
    }
}

/// The types of parameters, by function and name.
#[derive(Debug, Clone, Default)]
pub struct ToolSchemas(HashMap<String, HashMap<String, Types>>);

impl ToolSchemas {
    /// Of a list of tools as in OpenAI's API, `{"type": "function", "function": {"name", "parameters"}}`, or of the
    /// functions alone; of what has another form nothing is known.
    pub fn new(tools: &Value) -> Self {
        let mut found = HashMap::new();
        for tool in tools.as_array().into_iter().flatten() {
            let function = tool.get("function").unwrap_or(tool);
            let properties = function.pointer("/parameters/properties");
            let (Some(Value::String(name)), Some(Value::Object(properties))) =
                (function.get("name"), properties)
            else {
                continue;
            };
            let types = properties
                .iter()
                .map(|(key, schema)| (key.clone(), Types::of_schema(schema)));
            found.insert(name.clone(), types.collect());
        }
        Self(found)
    }

    /// The types that a parameter may have.
    pub(super) fn types(&self, function: &str, parameter: &str) -> Types {
        let parameters = self.0.get(function);
        parameters
            .and_then(|parameters| parameters.get(parameter))
            .copied()
            .unwrap_or(Types::ANY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_types_of_a_schema_are_those_that_it_names_in_any_of_its_ways() {
        let both = |a: Types, b: Types| Types(a.0 | b.0);
        for (schema, expected) in [
            (json!({"type": "integer"}), Types::NUMBER),
            (
                json!({"type": "array", "items": {"type": "string"}}),
                Types::LIST,
            ),
            (
                json!({"type": ["string", "null"]}),
                both(Types::STRING, Types::NULL),
            ),
            (json!({"type": "string", "enum": [1]}), Types::STRING),
            (
                json!({"enum": ["a", 1]}),
                both(Types::STRING, Types::NUMBER),
            ),
            (json!({"const": true}), Types::BOOLEAN),
            (
                json!({"anyOf": [{"type": "object"}, {"type": "null"}]}),
                both(Types::OBJECT, Types::NULL),
            ),
            (
                json!({"oneOf": [{"type": "number"}, {"$ref": "#/$defs/x"}]}),
                Types::ANY,
            ),
            (
                json!({"type": "string", "nullable": true}),
                both(Types::STRING, Types::NULL),
            ),
            (json!({"anyOf": []}), Types::ANY),
            (json!({"type": "date"}), Types::ANY),
            (json!({"$ref": "#/$defs/x"}), Types::ANY),
            (json!(true), Types::ANY),
        ] {
            assert_eq!(Types::of_schema(&schema), expected, "{schema}");
        }
    }

    #[test]
    fn tools_of_another_form_are_passed_over() {
        let good = json!({"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}});
        let tools = json!([
            1, {}, {"function": 3}, {"function": {"name": 1}}, {"function": {"name": "g"}},
            {"function": {"name": "h", "parameters": {"properties": []}}}, {"type": "function", "function": good},
        ]);
        let schemas = ToolSchemas::new(&tools);
        assert_eq!(schemas.types("f", "a"), Types::STRING);
        assert_eq!(schemas.types("f", "b"), Types::ANY);
        assert_eq!(schemas.types("g", "a"), Types::ANY);
        assert_eq!(
            ToolSchemas::new(&json!([good])).types("f", "a"),
            Types::STRING
        );
        assert_eq!(ToolSchemas::new(&json!("x")).types("f", "a"), Types::ANY);
    }
}
