//! Prompts of a completion: texts or token ids, one or many.

use octavo_text::Tokenizer;
use serde_json::Value;

use crate::error::ApiError;
use crate::model::Model;

/// Prompts of one body at most.
const MAX_PROMPTS: usize = 2048;

/// A prompt as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Its token ids; `name` is the field it came in. Special tokens in a text are tokens.
    pub(crate) fn into_ids(self, name: &str, model: &Model) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Ids(ids) => Ok(ids),
            Self::Text(text) => {
                let tokenizer: &Tokenizer = model.require_tokenizer()?;
                let mut ids = tokenizer.encode(&text, true, true).map_err(|error| {
                    ApiError::invalid(format!("{name} cannot be tokenized: {error}"))
                })?;
                if ids.is_empty() {
                    ids.extend(tokenizer.bos_id());
                }
                if ids.is_empty() {
                    let allowed = "non-empty: this model has no beginning-of-sequence token";
                    return Err(ApiError::field(name, allowed, &Value::from("")));
                }
                Ok(ids)
            }
        }
    }
}

/// The prompts of a field of this name.
pub(crate) fn parse(
    name: &str,
    value: Option<Value>,
    vocab_size: u32,
) -> Result<Vec<Prompt>, ApiError> {
    let allowed = "text, token ids, or a list of them";
    match value {
        None => Err(ApiError::field(name, allowed, &Value::Null)),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) if list.is_empty() => {
            Err(ApiError::field(name, "non-empty", &Value::Array(list)))
        }
        Some(Value::Array(list)) if list[0].is_number() => {
            Ok(vec![Prompt::Ids(ids(name, &list, vocab_size)?)])
        }
        Some(Value::Array(list)) => {
            if list.len() > MAX_PROMPTS {
                let given = Value::from(format!("{} prompts", list.len()));
                return Err(ApiError::field(
                    name,
                    format!("at most {MAX_PROMPTS} prompts"),
                    &given,
                ));
            }
            list.into_iter()
                .map(|one| entry(name, one, vocab_size))
                .collect()
        }
        Some(other) => Err(ApiError::field(name, allowed, &other)),
    }
}

fn entry(name: &str, value: Value, vocab_size: u32) -> Result<Prompt, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => Err(ApiError::field(
            name,
            "a list of non-empty texts",
            &Value::String(text),
        )),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) if list.is_empty() => Err(ApiError::field(
            name,
            "lists of at least one token id",
            &Value::Array(list),
        )),
        Value::Array(list) => Ok(Prompt::Ids(ids(name, &list, vocab_size)?)),
        other => Err(ApiError::field(
            name,
            "made of texts or lists of token ids",
            &other,
        )),
    }
}

fn ids(name: &str, list: &[Value], vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    let id = |value: &Value| {
        if !value.is_i64() && !value.is_u64() {
            return Err(ApiError::field(name, "made of integer token ids", value));
        }
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(|&id| id < vocab_size).ok_or_else(|| {
            let allowed = format!("in the vocabulary, from 0 to {}", vocab_size - 1);
            ApiError::field(name, allowed, value)
        })
    };
    list.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_prompt_has_four_forms() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        for (given, expected) in [
            (json!("a"), vec![text("a")]),
            (json!(""), vec![text("")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![Prompt::Ids(vec![1, 2])]),
            (
                json!([[1], [2]]),
                vec![Prompt::Ids(vec![1]), Prompt::Ids(vec![2])],
            ),
            (json!(["a", [3]]), vec![text("a"), Prompt::Ids(vec![3])]),
        ] {
            assert_eq!(parse("prompt", Some(given), 4).unwrap(), expected);
        }
    }

    #[test]
    fn everything_else_is_refused_by_its_name() {
        for given in [
            json!([]),
            json!([[]]),
            json!([""]),
            json!({}),
            json!(3),
            json!(true),
            json!([1, "a"]),
            json!([-1]),
            json!([4]),
            json!([1u64 << 62]),
            json!([1.0]),
            json!([true]),
            json!([[1], 2]),
            json!(vec!["a"; MAX_PROMPTS + 1]),
        ] {
            let error = parse("prompt", Some(given.clone()), 4).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("prompt"), "{given}");
        }
        assert!(parse("prompt", None, 4).is_err());
    }
}
