//! Brings messages into the form that templates expect.

use serde_json::Value;

use super::TemplateError;

/// Whether the template itself tells content parts apart by their type.
pub(super) fn wants_structured_content(source: &str) -> bool {
    ["['type']", "[\"type\"]", ".type"]
        .iter()
        .any(|access| source.contains(access))
}

/// Checks that `messages` is a list of objects with a role, and evens out forms that mean the same.
pub(super) fn normalized(messages: &Value, structured: bool) -> Result<Value, TemplateError> {
    let invalid = |message: String| TemplateError::InvalidMessages { message };
    let Value::Array(list) = messages else {
        return Err(invalid("must be a list".to_owned()));
    };
    if list.is_empty() {
        return Err(invalid("must not be empty".to_owned()));
    }
    let mut result = Vec::with_capacity(list.len());
    for (i, message) in list.iter().enumerate() {
        let mut message = message.clone();
        let Some(fields) = message.as_object_mut() else {
            return Err(invalid(format!("[{i}] must be an object")));
        };
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(invalid(format!("[{i}].role must be a string")));
        }
        let content = match fields.get("content") {
            None | Some(Value::Null) => Value::String(String::new()),
            Some(Value::String(text)) => Value::String(text.clone()),
            Some(Value::Array(parts)) if structured => Value::Array(parts.clone()),
            Some(Value::Array(parts)) => Value::String(joined(parts, i)?),
            Some(_) => {
                return Err(invalid(format!(
                    "[{i}].content must be a string or a list of parts"
                )));
            }
        };
        fields.insert("content".to_owned(), content);
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            calls.iter_mut().for_each(parse_arguments);
        }
        result.push(message);
    }
    Ok(Value::Array(result))
}

/// The text of content parts, for templates that know strings only.
fn joined(parts: &[Value], i: usize) -> Result<String, TemplateError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (j, part) in parts.iter().enumerate() {
        let text = part.as_str().or_else(|| part["text"].as_str());
        texts.push(text.ok_or_else(|| TemplateError::InvalidMessages {
            message: format!(
                "[{i}].content[{j}] is not text, and the chat template accepts text only"
            ),
        })?);
    }
    Ok(texts.join("\n"))
}

/// Clients send the arguments of a tool call as JSON text; templates expect the object.
fn parse_arguments(call: &mut Value) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else {
        return;
    };
    let parsed = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(parsed) = parsed.filter(Value::is_object) {
        *arguments = parsed;
    }
}

/// Appends a marker to the text of the last message.
pub(super) fn append_to_final(messages: &mut Value, end: char) -> Result<(), TemplateError> {
    let content = messages
        .as_array_mut()
        .and_then(|list| list.last_mut())
        .map(|message| &mut message["content"]);
    let text = match content {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => match parts.last_mut().map(|part| &mut part["text"]) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        _ => None,
    };
    let text = text.ok_or_else(|| TemplateError::InvalidOption {
        param: "continue_final_message".to_owned(),
        message: "the final message does not end with text".to_owned(),
    })?;
    text.push(end);
    Ok(())
}
