//! The special ids of a model and the files of a checkpoint folder that name them.

use std::path::Path;

use serde_json::Value;

use super::{Tokenizer, TokenizerError};

/// Special tokens that end a turn or a text, in the spelling of the families that use them.
const EOG_NAMES: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|eot|>",
    "<|eom|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "[EOT]",
];

/// The ids that have a role in a model's text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence, as configured; the tokenizer's own comes first.
    pub eos: Vec<u32>,
    /// Every id that ends a generation: `eos` and what is known by name. Sorted.
    pub eog: Vec<u32>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Padding token.
    pub pad: Option<u32>,
}

impl Tokenizer {
    /// Reads a checkpoint folder: `tokenizer.json`, and what is there of `tokenizer_config.json`, `generation_config.json`,
    /// of chat templates: `chat_template.jinja` and `additional_chat_templates/tool_use.jinja` before `chat_template.json`
    /// before those of the configuration.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let dir = dir.as_ref();
        let mut tokenizer = Self::from_file(dir.join("tokenizer.json"))?;
        if let Some(config) = read_json(&dir.join("tokenizer_config.json"))? {
            let id = |name: &str| {
                token_content(&config[name]).and_then(|token| tokenizer.token_to_id(token))
            };
            tokenizer.ids = SpecialIds {
                bos: id("bos_token"),
                eos: id("eos_token").into_iter().collect(),
                eog: Vec::new(),
                unk: id("unk_token"),
                pad: id("pad_token"),
            };
            tokenizer.set_templates(&config["chat_template"]);
        }
        let path = dir.join("generation_config.json");
        if let Some(config) = read_json(&path)? {
            for id in ids_of(&config["eos_token_id"]) {
                let id = tokenizer.checked_id("eos_token_id of generation_config.json", id)?;
                if !tokenizer.ids.eos.contains(&id) {
                    tokenizer.ids.eos.push(id);
                }
            }
        }
        if let Some(file) = read_json(&dir.join("chat_template.json"))? {
            tokenizer.set_templates(&file["chat_template"]);
        }
        if let Some(template) = read_optional(&dir.join("chat_template.jinja"))? {
            tokenizer.chat_template = Some(template);
            tokenizer.tool_template = None;
        }
        let named = dir.join("additional_chat_templates");
        if let Some(template) = read_optional(&named.join(format!("{TOOL_USE}.jinja")))? {
            tokenizer.tool_template = Some(template);
        }
        tokenizer.collect_eog();
        Ok(tokenizer)
    }

    /// Takes over a template, or several named ones; nothing if there is none.
    pub(super) fn set_templates(&mut self, value: &Value) {
        if let Some(template) = named_template(value, "default") {
            self.chat_template = Some(template);
            self.tool_template = named_template(value, TOOL_USE).filter(|_| value.is_array());
        }
    }

    /// The id if it is inside the vocabulary.
    pub(super) fn checked_id(&self, key: &str, id: u64) -> Result<u32, TokenizerError> {
        let vocab_size = self.vocab_size();
        match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab_size => Ok(id),
            _ => Err(TokenizerError::IdOutOfVocabulary {
                key: key.to_owned(),
                id,
                vocab_size,
            }),
        }
    }

    /// Recomputes `eog` from `eos` and the names of special tokens.
    pub(super) fn collect_eog(&mut self) {
        let special = |name: &str| self.token_to_id(name).filter(|&id| self.is_special(id));
        // Where messages have several parts, as in gpt-oss, `<|end|>` ends a part and these two end the turn.
        let has_parts = special("<|return|>").is_some() && special("<|call|>").is_some();
        let named = EOG_NAMES
            .iter()
            .filter(|name| !(has_parts && **name == "<|end|>"))
            .filter_map(|name| special(name));
        let mut eog: Vec<u32> = named
            .chain(self.ids.eos.iter().copied())
            .chain(self.ids.eog.iter().copied())
            .collect();
        eog.sort_unstable();
        eog.dedup();
        self.ids.eog = eog;
    }
}

fn read_optional(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Io {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let invalid = |error: serde_json::Error| TokenizerError::InvalidConfig {
        path: path.to_path_buf(),
        reason: error.to_string(),
    };
    read_optional(path)?
        .map(|text| serde_json::from_str(&text).map_err(invalid))
        .transpose()
}

/// A token is written as a string or as an object with its content.
fn token_content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// The name of the template for requests with tools.
const TOOL_USE: &str = "tool_use";

/// A template is a string, or one of several named ones.
fn named_template(value: &Value, name: &str) -> Option<String> {
    let named = || {
        value
            .as_array()?
            .iter()
            .find(|entry| entry["name"] == name)?["template"]
            .as_str()
    };
    value.as_str().or_else(named).map(str::to_owned)
}

fn ids_of(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(values) => values.iter().filter_map(Value::as_u64).collect(),
        _ => value.as_u64().into_iter().collect(),
    }
}
