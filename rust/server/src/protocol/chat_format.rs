//! How a model writes messages: which parsers read its reasoning and its tool calls.

use octavo_text::Tokenizer;
use octavo_text::parser;
use octavo_text::template::ChatTemplate;

const AUTO: &str = "auto";
const NONE: &str = "none";

/// What a chat template says of the messages that its model writes.
#[derive(Debug)]
pub(crate) struct ChatFormat {
    pub(crate) template: ChatTemplate,
    pub(crate) tool_parser: Option<String>,
    pub(crate) reasoning_parser: Option<String>,
    /// Whether calls are read, or it was said that they need not be.
    pub(crate) reads_tools: bool,
    /// Whether the template tells the model of tools.
    pub(crate) writes_tools: bool,
}

impl ChatFormat {
    /// Compiles a template and picks its parsers; `auto` goes by the template, `none` is no parser.
    pub(crate) fn new(
        source: &str,
        tokenizer: &Tokenizer,
        tool_call_parser: &str,
        reasoning_parser: &str,
    ) -> Result<Self, String> {
        let template = ChatTemplate::new(source, tokenizer).map_err(|error| error.to_string())?;
        let mut tool = parser::detect_tool_parser(source);
        let mut reasoning = parser::detect_reasoning_parser(source);
        let is_given = |name: &str| name != AUTO && name != NONE;
        // One format of calls and reasoning; what is found goes with what is given.
        if is_given(tool_call_parser)
            && (tool_call_parser == "harmony") != (reasoning == Some("gpt_oss"))
        {
            reasoning = (tool_call_parser == "harmony").then_some("gpt_oss");
        }
        if is_given(reasoning_parser)
            && (reasoning_parser == "gpt_oss") != (tool == Some("harmony"))
        {
            tool = (reasoning_parser == "gpt_oss").then_some("harmony");
        }
        let chosen = |given: &str, found: Option<&str>| match given {
            AUTO => found.map(str::to_owned),
            NONE => None,
            name => Some(name.to_owned()),
        };
        let tool_parser = chosen(tool_call_parser, tool);
        Ok(Self {
            template,
            reads_tools: tool_parser.is_some() || tool_call_parser == NONE,
            tool_parser,
            reasoning_parser: chosen(reasoning_parser, reasoning),
            writes_tools: source.contains("tools"),
        })
    }
}
