//! Chat templates in a sandbox, and the border between the template's text and the user's.
//!
//! Templates are Jinja programs that come with model files. They run with a fuel and an output limit, see plain data
//! only, and cannot reach files, other templates or internals. Special tokens inside user strings stay plain text: see
//! [`mark`](self::mark) for how the border survives rendering.

mod functions;
mod mark;
mod messages;
mod sandbox;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;

use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Map, Value};

use crate::tokenizer::Tokenizer;
use mark::Marker;

const NAME: &str = "chat_template";
/// Instructions a template may execute for one prompt.
const FUEL: u64 = 10_000_000;
/// Bytes of text a template may produce.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Bytes of source a template may have.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Why a chat template cannot be loaded or rendered. All but the first two are the request's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TemplateError {
    #[error("the chat template has an error in line {line}: {message}")]
    Syntax { line: usize, message: String },
    #[error("the chat template uses {name:?} in line {line}, which the sandbox forbids")]
    Forbidden { name: String, line: usize },
    #[error("messages: the chat template refuses them: {message}")]
    Refused { message: String },
    #[error("messages: the chat template cannot render them (line {line}): {message}")]
    Failed { line: usize, message: String },
    #[error("messages: the chat template ran for more than {limit} instructions")]
    OutOfFuel { limit: u64 },
    #[error("messages: the chat template wrote more than {limit} bytes")]
    TooMuchOutput { limit: usize },
    #[error("messages: {message}")]
    InvalidMessages { message: String },
    #[error("{param}: {message}")]
    InvalidOption { param: String, message: String },
}

/// What a rendering needs besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions<'a> {
    /// Tool definitions, a JSON list.
    pub tools: Option<&'a Value>,
    /// Whether the prompt ends with the header of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside the last message, for the model to go on with it.
    pub continue_final_message: bool,
    /// Further template variables (`chat_template_kwargs`, `documents`).
    pub kwargs: Option<&'a Map<String, Value>>,
}

/// A rendered prompt: its text, and where user text would otherwise be taken for special tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The whole text.
    pub text: String,
    /// Byte offsets in `text`, ascending: no special token may be recognised across one of them.
    pub breaks: Vec<usize>,
}

impl Prompt {
    /// The pieces between breaks: inside each of them special tokens are parsed, never over its borders.
    pub fn segments(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = std::iter::once(0).chain(self.breaks.iter().copied());
        let ends = self
            .breaks
            .iter()
            .copied()
            .chain(std::iter::once(self.text.len()));
        starts.zip(ends).map(|(start, end)| start..end)
    }

    /// The text with a marker character, one that it does not contain, at every break.
    pub(crate) fn marked(&self) -> (String, char) {
        let marker = mark::unused_character([self.text.as_str()]);
        let pieces: Vec<&str> = self.segments().map(|range| &self.text[range]).collect();
        (pieces.join(marker.encode_utf8(&mut [0; 4])), marker)
    }
}

/// A compiled chat template with the special tokens of its tokenizer.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    marker: Marker,
    variables: HashMap<&'static str, String>,
    structured_content: bool,
    /// Renders requests with tools in place of this one.
    with_tools: Option<Box<ChatTemplate>>,
}

impl ChatTemplate {
    /// Compiles a template for a tokenizer; `bos_token` and the like are its tokens.
    ///
    /// The tokenizer's own template comes with the one that it has for requests with tools.
    ///
    /// Errors: [`TemplateError::Syntax`] and [`TemplateError::Forbidden`].
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let ids = tokenizer.ids();
        let named = [
            ("bos_token", ids.bos),
            ("eos_token", ids.eos.first().copied()),
            ("unk_token", ids.unk),
            ("pad_token", ids.pad),
        ];
        let own = tokenizer.chat_template() == Some(source);
        let variables: HashMap<&'static str, String> = named
            .into_iter()
            .filter_map(|(name, id)| Some((name, tokenizer.token_str(id?)?)))
            .collect();
        let special: Vec<String> = tokenizer
            .special_tokens()
            .into_iter()
            .map(|(token, _)| token)
            .collect();
        let mut template = Self::compile(source, variables.clone(), &special)?;
        if let Some(source) = tokenizer.tool_chat_template().filter(|_| own) {
            let with_tools = Self::compile(source, variables, &special)?;
            template.with_tools = Some(Box::new(with_tools));
        }
        Ok(template)
    }

    fn compile(
        source: &str,
        variables: HashMap<&'static str, String>,
        special: &[String],
    ) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            let message = format!(
                "it has {} bytes, at most {MAX_SOURCE_BYTES} are accepted",
                source.len()
            );
            return Err(TemplateError::Syntax { line: 1, message });
        }
        sandbox::check(source)?;
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        functions::register(&mut environment);
        environment
            .add_template_owned(NAME, sandbox::without_generation_tags(source))
            .map_err(|error| TemplateError::Syntax {
                line: error.line().unwrap_or(1),
                message: describe(&error),
            })?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            marker: Marker::new(special),
            variables,
            structured_content: messages::wants_structured_content(source),
            with_tools: None,
        })
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a list of messages.
    ///
    /// `content: null` becomes an empty string, and a list of text parts one string if the template knows no parts.
    /// Arguments of replayed tool calls that are JSON text become objects. Errors are meant for the client: they carry the
    /// template's own message.
    pub fn render(
        &self,
        messages: &Value,
        options: &RenderOptions<'_>,
    ) -> Result<Prompt, TemplateError> {
        if let (Some(template), Some(Value::Array(_))) = (&self.with_tools, options.tools) {
            return template.render(messages, options);
        }
        let mut messages = messages::normalized(messages, self.structured_content)?;
        let tools = options.tools.filter(|tools| !tools.is_null()).cloned();
        let mut kwargs = options.kwargs.cloned().unwrap_or_default();
        let marks = self.marker.marks(
            &self.source,
            [&messages, &tools.clone().into(), &kwargs.clone().into()],
        );
        if options.continue_final_message && options.add_generation_prompt {
            return Err(TemplateError::InvalidOption {
                param: "continue_final_message".to_owned(),
                message: "cannot be combined with add_generation_prompt".to_owned(),
            });
        }
        self.marker.apply(&mut messages, marks);
        let tools = tools.map(|mut tools| {
            self.marker.apply(&mut tools, marks);
            tools
        });
        for value in kwargs.values_mut() {
            self.marker.apply(value, marks);
        }
        if options.continue_final_message {
            messages::append_to_final(&mut messages, marks.end)?;
        }
        let context = self.context(messages, tools, kwargs, options.add_generation_prompt)?;
        let mut text = self.run(&context)?;
        if options.continue_final_message {
            let end = text
                .rfind(marks.end)
                .ok_or_else(|| TemplateError::InvalidOption {
                    param: "continue_final_message".to_owned(),
                    message: "the chat template does not write the final message".to_owned(),
                })?;
            text.truncate(end);
        }
        Ok(mark::unmark(&text, marks))
    }

    fn context(
        &self,
        messages: Value,
        tools: Option<Value>,
        kwargs: Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<Value, TemplateError> {
        let mut context = Map::new();
        for (name, token) in &self.variables {
            context.insert((*name).to_owned(), Value::String(token.clone()));
        }
        context.insert("messages".to_owned(), messages);
        context.insert("tools".to_owned(), tools.unwrap_or(Value::Null));
        context.insert("documents".to_owned(), Value::Null);
        context.insert(
            "add_generation_prompt".to_owned(),
            Value::Bool(add_generation_prompt),
        );
        for (name, value) in kwargs {
            if matches!(
                name.as_str(),
                "messages" | "tools" | "add_generation_prompt"
            ) {
                let message = "is set by the request itself".to_owned();
                return Err(TemplateError::InvalidOption {
                    param: format!("chat_template_kwargs.{name}"),
                    message,
                });
            }
            context.insert(name, value);
        }
        Ok(Value::Object(context))
    }

    fn run(&self, context: &Value) -> Result<String, TemplateError> {
        let template = self
            .environment
            .get_template(NAME)
            .expect("invariant: added by compile");
        let mut output = sandbox::LimitedOutput::new(MAX_OUTPUT_BYTES);
        let result = template.render_captured_to(context, &mut output);
        if output.exceeded() {
            return Err(TemplateError::TooMuchOutput {
                limit: MAX_OUTPUT_BYTES,
            });
        }
        result.map_err(|error| classify(&error))?;
        Ok(output.into_text())
    }
}

fn classify(error: &minijinja::Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if let Some(raised) = current.downcast_ref::<functions::Raised>() {
            return TemplateError::Refused {
                message: raised.0.clone(),
            };
        }
        source = current.source();
    }
    if error.kind() == minijinja::ErrorKind::OutOfFuel {
        return TemplateError::OutOfFuel { limit: FUEL };
    }
    TemplateError::Failed {
        line: error.line().unwrap_or(1),
        message: describe(error),
    }
}

/// The error without file names and source excerpts.
fn describe(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}
