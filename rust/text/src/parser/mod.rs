//! Reasoning and tool calls in the text of a model, while it grows.
//!
//! Text goes in as it comes out of [`crate::ChoiceText`], events come out as soon as they cannot change any more. Every
//! parser is a machine that reads each byte once and holds back no more than what can still become a marker, or the head
//! of a call whose name is not known yet; so time is linear, and events do not depend on how the text is cut.
//!
//! A text that looks like a call and turns out to be none before its name is known is content, as the model wrote it.
//! Events are never taken back: if a call breaks off later, it ends as not valid and the text that follows is content.
//! White space behind a call and at both ends of a reasoning marker belongs to the format.
//!
//! Formats follow the chat templates that the makers of these models publish.

mod builtin;
mod call;
mod deepseek;
mod harmony;
mod header;
mod hermes;
mod json;
mod llama;
mod markers;
mod mistral;
mod qwen3_coder;
mod reasoning;
mod registry;
mod schema;
mod sink;
#[cfg(test)]
mod tests;
mod value;

use std::fmt::Debug;
use std::sync::Arc;

pub use registry::{
    REASONING_PARSERS, TOOL_PARSERS, detect_reasoning_parser, detect_tool_parser,
    prompt_opens_reasoning,
};
pub use schema::ToolSchemas;
use sink::Sink;

use crate::tokenizer::Tokenizer;

/// What a text turned out to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Text for the user.
    Content(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A call begins.
    ToolCallStart {
        /// Calls are counted from 0.
        index: usize,
        /// Name of the function.
        name: String,
    },
    /// More of the arguments of the call that began last; joined they are the JSON that the model wrote.
    ToolCallArguments {
        /// The call.
        index: usize,
        /// Text to append.
        delta: String,
    },
    /// A call ends.
    ToolCallEnd {
        /// The call.
        index: usize,
        /// Whether the arguments are one whole JSON object.
        valid: bool,
    },
}

/// Why a parser cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParserError {
    /// There is no parser of that name.
    #[error("{param} is {value:?}, supported: {supported}")]
    Unknown {
        /// `tool_parser` or `reasoning_parser`.
        param: &'static str,
        /// The name given.
        value: String,
        /// The names there are.
        supported: String,
    },
    /// `harmony` and `gpt_oss` are one format, which no other can be joined with.
    #[error("tool_parser {tool:?} cannot be combined with reasoning_parser {reasoning:?}")]
    Incompatible {
        /// The tool parser given.
        tool: String,
        /// The reasoning parser given.
        reasoning: String,
    },
}

/// What a machine did with the text at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// That many bytes are dealt with, or none and the machine is in another state.
    Consumed(usize),
    /// The text can only be told apart with more of it; it is no longer than a marker.
    Wait,
}

impl Step {
    /// All but what a marker may begin with.
    fn all_but_held(plain: usize) -> Self {
        if plain == 0 {
            Self::Wait
        } else {
            Self::Consumed(plain)
        }
    }
}

/// One format.
trait Machine: Debug + Send + Sync {
    /// Deals with a beginning of `text`, which is not empty.
    fn step(&mut self, text: &str, sink: &mut Sink) -> Step;

    /// Ends the text; `rest` is what a step waited with.
    fn finish(&mut self, rest: &str, sink: &mut Sink);
}

/// A machine and the text it waits with.
#[derive(Debug)]
struct Stage {
    machine: Box<dyn Machine>,
    waiting: String,
}

impl Stage {
    fn new(machine: Box<dyn Machine>) -> Self {
        Self {
            machine,
            waiting: String::new(),
        }
    }

    fn push(&mut self, delta: &str, sink: &mut Sink) {
        let joined = (!self.waiting.is_empty()).then(|| std::mem::take(&mut self.waiting) + delta);
        let mut rest = joined.as_deref().unwrap_or(delta);
        while !rest.is_empty() {
            match self.machine.step(rest, sink) {
                Step::Consumed(bytes) => rest = &rest[bytes..],
                Step::Wait => break,
            }
        }
        self.waiting.push_str(rest);
    }

    fn finish(&mut self, sink: &mut Sink) {
        let rest = std::mem::take(&mut self.waiting);
        self.machine.finish(&rest, sink);
    }
}

/// The parser of one choice's text.
#[derive(Debug)]
pub struct OutputParser {
    reasoning: Option<Stage>,
    tools: Option<Stage>,
    sink: Sink,
    markers: Vec<&'static str>,
    finished: bool,
}

impl OutputParser {
    /// A parser by the names of [`TOOL_PARSERS`] and [`REASONING_PARSERS`]; without any, all text is content.
    ///
    /// `reasoning_open` says that the prompt ends inside the reasoning, see [`prompt_opens_reasoning`].
    pub fn new(
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
        reasoning_open: bool,
    ) -> Result<Self, ParserError> {
        Self::for_tools(
            tool_parser,
            reasoning_parser,
            reasoning_open,
            &Arc::default(),
        )
    }

    /// As [`OutputParser::new`], with the tools that the request offers: formats that write values without types
    /// (`qwen3_coder`, built-in tools of `llama3_json`) give them those of the schemas.
    pub fn for_tools(
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
        reasoning_open: bool,
        schemas: &Arc<ToolSchemas>,
    ) -> Result<Self, ParserError> {
        registry::build(tool_parser, reasoning_parser, reasoning_open, schemas)
    }

    /// The markers of the formats: special tokens among them must be part of the text.
    pub fn markers(&self) -> &[&'static str] {
        &self.markers
    }

    /// The special tokens of a vocabulary that are markers, sorted: [`crate::TextOptions::shown_special_ids`].
    pub fn special_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = self.markers.iter().filter_map(|m| tokenizer.token_to_id(m));
        let mut ids: Vec<u32> = ids.filter(|&id| tokenizer.is_special(id)).collect();
        ids.sort_unstable();
        ids
    }

    /// Appends text; after [`OutputParser::finish`] nothing more is taken.
    pub fn push(&mut self, delta: &str) -> Vec<Event> {
        if self.finished {
            return Vec::new();
        }
        match &mut self.reasoning {
            Some(reasoning) => {
                reasoning.push(delta, &mut self.sink);
                self.tools_of_content()
            }
            None => {
                push_content(&mut self.tools, delta, &mut self.sink);
                self.sink.take()
            }
        }
    }

    /// Ends the text: what was held back is content, a call that has begun ends.
    pub fn finish(&mut self) -> Vec<Event> {
        if std::mem::replace(&mut self.finished, true) {
            return Vec::new();
        }
        let mut events = Vec::new();
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.finish(&mut self.sink);
            events = self.tools_of_content();
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut self.sink);
        }
        events.extend(self.sink.take());
        events
    }

    /// The events so far, with the content among them read for calls.
    fn tools_of_content(&mut self) -> Vec<Event> {
        for event in self.sink.take() {
            match event {
                Event::Content(text) => push_content(&mut self.tools, &text, &mut self.sink),
                event => self.sink.push(event),
            }
        }
        self.sink.take()
    }
}

fn push_content(tools: &mut Option<Stage>, text: &str, sink: &mut Sink) {
    match tools {
        Some(tools) => tools.push(text, sink),
        None => sink.content(text),
    }
}
