//! Parsers by name, and which of them a chat template calls for.

use std::sync::Arc;

use super::reasoning::{self, Think};
use super::schema::ToolSchemas;
use super::sink::Sink;
use super::{Machine, OutputParser, ParserError, Stage};
use super::{deepseek, harmony, hermes, llama, mistral, qwen3_coder};

/// Names of tool parsers.
pub const TOOL_PARSERS: &[&str] = &[
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "harmony",
    "qwen3_coder",
];

/// Names of reasoning parsers.
pub const REASONING_PARSERS: &[&str] = &["qwen3", "deepseek_r1", "gpt_oss"];

pub(super) fn build(
    tool_parser: Option<&str>,
    reasoning_parser: Option<&str>,
    reasoning_open: bool,
    schemas: &Arc<ToolSchemas>,
) -> Result<OutputParser, ParserError> {
    if let (Some(tool), Some(reasoning)) = (tool_parser, reasoning_parser)
        && (tool == "harmony") != (reasoning == "gpt_oss")
        && TOOL_PARSERS.contains(&tool)
        && REASONING_PARSERS.contains(&reasoning)
    {
        return Err(ParserError::Incompatible {
            tool: tool.to_owned(),
            reasoning: reasoning.to_owned(),
        });
    }
    let mut markers = Vec::new();
    let mut tools = match tool_parser {
        None => None,
        Some(name) => Some(tool_stage(name, schemas, &mut markers)?),
    };
    let reasoning = match reasoning_parser {
        None => None,
        // One machine reads both the calls and the reasoning of this format.
        Some("gpt_oss") => {
            tools = Some(tool_stage("harmony", schemas, &mut markers)?);
            None
        }
        // Its template opens the reasoning, or else the model does it at once.
        Some("deepseek_r1") => Some(Stage::new(Box::new(Think::new(true)))),
        Some("qwen3") => Some(Stage::new(Box::new(Think::new(reasoning_open)))),
        Some(other) => return Err(unknown("reasoning_parser", other, REASONING_PARSERS)),
    };
    if reasoning.is_some() {
        markers.extend(reasoning::MARKERS);
    }
    markers.sort_unstable();
    markers.dedup();
    Ok(OutputParser {
        reasoning,
        tools,
        sink: Sink::default(),
        markers,
        finished: false,
    })
}

fn tool_stage(
    name: &str,
    schemas: &Arc<ToolSchemas>,
    markers: &mut Vec<&'static str>,
) -> Result<Stage, ParserError> {
    let (machine, found): (Box<dyn Machine>, _) = match name {
        "hermes" => (Box::new(hermes::Hermes::new()), hermes::MARKERS),
        "llama3_json" => (
            Box::new(llama::Llama3::new(Arc::clone(schemas))),
            llama::MARKERS,
        ),
        "mistral" => (Box::new(mistral::Mistral::new()), mistral::MARKERS),
        "deepseek_v3" => (Box::new(deepseek::DeepSeek::new()), deepseek::MARKERS),
        "harmony" => (Box::new(harmony::Harmony::new()), harmony::MARKERS),
        "qwen3_coder" => (
            Box::new(qwen3_coder::Qwen3Coder::new(Arc::clone(schemas))),
            qwen3_coder::MARKERS,
        ),
        other => return Err(unknown("tool_parser", other, TOOL_PARSERS)),
    };
    markers.extend(found);
    Ok(Stage::new(machine))
}

fn unknown(param: &'static str, value: &str, supported: &[&str]) -> ParserError {
    ParserError::Unknown {
        param,
        value: value.to_owned(),
        supported: supported.join(", "),
    }
}

/// The tool parser for what a chat template makes of calls, told by the markers in its source.
pub fn detect_tool_parser(template: &str) -> Option<&'static str> {
    let has = |text: &str| template.contains(text);
    if has("<｜tool▁calls▁begin｜>") {
        Some("deepseek_v3")
    } else if has("<|channel|>") && has("<|message|>") {
        Some("harmony")
    } else if has("[TOOL_CALLS]") {
        Some("mistral")
    } else if has("<function=") && has("<parameter=") {
        Some("qwen3_coder")
    } else if has("<tool_call>") {
        Some("hermes")
    } else if has("<|python_tag|>") || (has("<|start_header_id|>") && has("\"parameters\"")) {
        Some("llama3_json")
    } else {
        None
    }
}

/// The reasoning parser for a chat template, told in the same way.
pub fn detect_reasoning_parser(template: &str) -> Option<&'static str> {
    let has = |text: &str| template.contains(text);
    if has("<|channel|>") && has("analysis") {
        Some("gpt_oss")
    } else if !has("</think>") && !has("<think>") {
        None
    } else if has("<｜Assistant｜>") && !has("thinking") {
        Some("deepseek_r1")
    } else {
        Some("qwen3")
    }
}

/// Whether a rendered prompt ends inside the reasoning: its template opened it for the model.
pub fn prompt_opens_reasoning(prompt: &str) -> bool {
    prompt.trim_end().ends_with("<think>")
}
