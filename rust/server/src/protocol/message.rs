//! The answer to a chat as it grows: content, reasoning and tool calls told apart.

use std::sync::Arc;

use octavo_grammar::calls::{Calls, Force};
use octavo_grammar::constraint::Given;
use octavo_grammar::reasoning::{self, Reasoning};
use octavo_text::Tokenizer;
use octavo_text::parser::{Event, OutputParser, ToolSchemas};
use serde::Serialize;
use serde_json::{Value, json};

use super::chat_format::ChatFormat;
use super::reply::random_hex;
use crate::engine::RequestGrammar;
use crate::error::ApiError;
use crate::model::Model;

/// How the choices of one request become messages.
#[derive(Clone, Debug)]
pub(crate) struct AnswerFormat {
    tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    reasoning_open: bool,
    schemas: Arc<ToolSchemas>,
    /// Those that the model was told of.
    tools: Vec<Value>,
    force: Option<Force>,
    /// Whether only the first call of a message is told.
    one_call: bool,
}

impl AnswerFormat {
    /// `tools` are those that the model was told of; without any, what looks like a call is content. `force` says that it must call one. `reasoning_open` says that the prompt
    /// ends inside the reasoning, `continued` that it ends inside the model's own message.
    pub(crate) fn new(
        format: &ChatFormat,
        tools: Option<Value>,
        force: Option<Force>,
        reasoning_open: bool,
        continued: bool,
        one_call: bool,
    ) -> Self {
        let mut reasoning = format.reasoning_parser.clone();
        if continued && reasoning.as_deref() == Some("deepseek_r1") {
            // Of this format all begins with reasoning, but for a message that is past it.
            reasoning = Some("qwen3".to_owned());
        }
        Self {
            tool_parser: format.tool_parser.clone().filter(|_| tools.is_some()),
            reasoning_parser: reasoning,
            reasoning_open,
            schemas: tools
                .as_ref()
                .map_or_else(Arc::default, |tools| Arc::new(ToolSchemas::new(tools))),
            tools: match tools {
                Some(Value::Array(tools)) => tools,
                _ => Vec::new(),
            },
            force,
            one_call,
        }
    }

    /// Whether the request names the function that must be called.
    pub(crate) fn is_named(&self) -> bool {
        matches!(self.force, Some(Force::Named(_)))
    }

    /// The grammar of the answer, if it must be of a form: the constraint's, or a call. With a constraint, tools may still be called.
    pub(crate) fn grammar(
        &self,
        given: Option<&Given>,
        model: &Model,
    ) -> Result<Option<RequestGrammar>, ApiError> {
        // A forced call leaves no room for an answer that a constraint could hold for.
        let given = given.filter(|_| self.force.is_none());
        if given.is_none() && self.force.is_none() {
            return Ok(None);
        }
        let tokenizer = model.require_tokenizer()?;
        let format = self.tool_parser.as_deref().unwrap_or_default();
        let calls = Calls::new(
            format,
            &self.tools,
            self.force.as_ref(),
            !self.one_call,
            tokenizer,
        );
        let calls = calls.filter(|_| !self.tools.is_empty());
        if self.force.is_some() && calls.is_none() {
            let allowed = "'auto' or 'none': calls in the format of this model's chat template cannot be forced";
            return Err(ApiError::field(
                "tool_choice",
                allowed,
                &Value::from(format),
            ));
        }
        let reasoning = Reasoning::of(self.reasoning_parser.as_deref(), self.reasoning_open);
        let constraint = given.map(|given| &given.constraint);
        let source = reasoning::outputs(constraint, calls.as_ref(), reasoning, tokenizer);
        Ok(Some(RequestGrammar {
            param: given
                .map_or("tools", |given| given.param.as_str())
                .to_owned(),
            source: Arc::new(source),
        }))
    }

    fn parser(&self) -> Result<OutputParser, ApiError> {
        OutputParser::for_tools(
            self.tool_parser.as_deref(),
            self.reasoning_parser.as_deref(),
            self.reasoning_open,
            &self.schemas,
        )
        .map_err(|error| ApiError::failed(error.to_string()))
    }

    /// Special tokens that must stay in the text, because the parsers read them.
    pub(crate) fn shown_special_ids(&self, tokenizer: &Tokenizer) -> Result<Arc<[u32]>, ApiError> {
        Ok(self.parser()?.special_ids(tokenizer).into())
    }

    /// A reader for one choice.
    pub(crate) fn reader(&self) -> Result<MessageReader, ApiError> {
        Ok(MessageReader {
            parser: self.parser()?,
            // Mistral's templates accept ids of nine letters or digits in a later turn, and no others.
            nine_letters: self.tool_parser.as_deref() == Some("mistral"),
            one_call: self.one_call,
            has_called: false,
        })
    }
}

/// What is added to a call; `id`, `type` and `name` come with its first delta.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct CallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) function: FunctionDelta,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

/// What is added to a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<CallDelta>,
}

/// Makes what is to be added to a message of the growing text of one choice.
#[derive(Debug)]
pub(crate) struct MessageReader {
    parser: OutputParser,
    nine_letters: bool,
    one_call: bool,
    has_called: bool,
}

impl MessageReader {
    /// Whether the message has a call.
    pub(crate) fn has_called(&self) -> bool {
        self.has_called
    }

    /// Appends text.
    pub(crate) fn push(&mut self, text: &str) -> Delta {
        if text.is_empty() {
            return Delta::default();
        }
        let events = self.parser.push(text);
        self.delta(events)
    }

    /// Ends the text: what was held back comes out.
    pub(crate) fn finish(&mut self) -> Delta {
        let events = self.parser.finish();
        self.delta(events)
    }

    fn delta(&mut self, events: Vec<Event>) -> Delta {
        let mut delta = Delta::default();
        for event in events {
            match event {
                Event::Content(text) => delta.content.get_or_insert_default().push_str(&text),
                Event::Reasoning(text) => {
                    delta
                        .reasoning_content
                        .get_or_insert_default()
                        .push_str(&text);
                }
                Event::ToolCallStart { index, .. } | Event::ToolCallArguments { index, .. }
                    if self.one_call && index > 0 => {}
                Event::ToolCallStart { index, name } => {
                    self.has_called = true;
                    delta.tool_calls.push(CallDelta {
                        index,
                        id: Some(self.call_id()),
                        kind: Some("function"),
                        function: FunctionDelta {
                            name: Some(name),
                            arguments: String::new(),
                        },
                    });
                }
                Event::ToolCallArguments { index, delta: text } => {
                    delta.extend_call(index, &text);
                }
                Event::ToolCallEnd { .. } => {}
            }
        }
        delta
    }

    fn call_id(&self) -> String {
        // Without randomness an id is still unique in its message.
        let digits = random_hex().unwrap_or_default();
        if self.nine_letters {
            digits.chars().chain("000000000".chars()).take(9).collect()
        } else {
            format!("call_{digits}")
        }
    }
}

impl Delta {
    fn extend_call(&mut self, index: usize, text: &str) {
        match self
            .tool_calls
            .last_mut()
            .filter(|call| call.index == index)
        {
            Some(call) => call.function.arguments.push_str(text),
            None => self.tool_calls.push(CallDelta {
                index,
                function: FunctionDelta {
                    name: None,
                    arguments: text.to_owned(),
                },
                ..CallDelta::default()
            }),
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Message {
    role: &'static str,
    /// Null only beside calls.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Clone, Debug, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Clone, Debug, Serialize)]
struct Function {
    name: String,
    /// JSON, as the model wrote it.
    arguments: String,
}

impl Message {
    /// Appends what a delta brings.
    pub(crate) fn add(&mut self, delta: Delta) {
        if let Some(text) = delta.content {
            self.content.get_or_insert_default().push_str(&text);
        }
        if let Some(text) = delta.reasoning_content {
            self.reasoning_content
                .get_or_insert_default()
                .push_str(&text);
        }
        for call in delta.tool_calls {
            if call.index == self.tool_calls.len() {
                self.tool_calls.push(Call {
                    id: call.id.unwrap_or_default(),
                    kind: "function",
                    function: Function {
                        name: call.function.name.unwrap_or_default(),
                        arguments: String::new(),
                    },
                });
            }
            if let Some(known) = self.tool_calls.get_mut(call.index) {
                known.function.arguments.push_str(&call.function.arguments);
            }
        }
    }

    /// The message as Anthropic's content blocks.
    pub(crate) fn blocks(&self) -> Vec<Value> {
        let mut blocks = Vec::new();
        if let Some(text) = &self.reasoning_content {
            blocks.push(json!({"type": "thinking", "thinking": text, "signature": ""}));
        }
        if let Some(text) = self.content.as_ref().filter(|text| !text.is_empty()) {
            blocks.push(json!({"type": "text", "text": text}));
        }
        for call in &self.tool_calls {
            let arguments = &call.function.arguments;
            // A call that was cut has no object; its text is all there is.
            let input: Value =
                serde_json::from_str(arguments).unwrap_or_else(|_| Value::from(arguments.as_str()));
            blocks.push(json!({"type": "tool_use", "id": call.id, "name": call.function.name, "input": input}));
        }
        blocks
    }

    /// The message once nothing more comes.
    pub(crate) fn finished(mut self) -> Self {
        self.role = "assistant";
        if self.content.is_none() && self.tool_calls.is_empty() {
            self.content = Some(String::new());
        }
        self
    }
}
