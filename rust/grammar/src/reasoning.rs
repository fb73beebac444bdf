//! Grammars of whole outputs: a constraint holds for the answer, and what the model reasons before it is free.

use octavo_text::Tokenizer;
use octavo_wire::{GrammarPart, GrammarSource, Syntax};

use crate::calls::Calls;
use crate::constraint::Constraint;
use crate::lark::{literal, marker, text_until};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";
/// Name of the part of a constraint.
const ANSWER: &str = "answer";

/// How the model reasons, as the parsers of `octavo_text` read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    /// The answer is all there is.
    None,
    /// `<think>…</think>` may come first.
    Think,
    /// The prompt has opened the reasoning.
    Open,
    /// gpt-oss: a message on the channel `analysis` may come first.
    Harmony,
}

impl Reasoning {
    /// By the name of the reasoning parser.
    #[must_use]
    pub fn of(parser: Option<&str>, is_open: bool) -> Self {
        match parser {
            None => Self::None,
            Some("gpt_oss") => Self::Harmony,
            // Of this format all begins with reasoning.
            Some("deepseek_r1") => Self::Open,
            Some(_) if is_open => Self::Open,
            Some(_) => Self::Think,
        }
    }
}

/// The grammar of outputs that answer as the constraint says, or call; at least one of both is given.
#[must_use]
pub fn outputs(
    constraint: Option<&Constraint>,
    calls: Option<&Calls>,
    reasoning: Reasoning,
    tokenizer: &Tokenizer,
) -> GrammarSource {
    let mut parts: Vec<GrammarPart> = constraint
        .iter()
        .map(|constraint| constraint.part(ANSWER))
        .collect();
    if calls.is_none() && reasoning == Reasoning::None {
        return GrammarSource { parts };
    }
    let mut ends = Vec::new();
    let mut rules = String::new();
    if constraint.is_some() {
        ends.push("content");
        rules += &content(reasoning, tokenizer);
    }
    if let Some(calls) = calls {
        ends.push("calls");
        rules += &calls.rules;
        parts.extend(calls.parts.iter().cloned());
    }
    let (start, before) = before(reasoning, tokenizer);
    let text = format!("start: {start}({})\n{rules}{before}", ends.join(" | "));
    let main = GrammarPart {
        name: "output".to_owned(),
        syntax: Syntax::Lark,
        text,
    };
    parts.insert(0, main);
    GrammarSource { parts }
}

/// The rule of an answer.
fn content(reasoning: Reasoning, tokenizer: &Tokenizer) -> String {
    if reasoning != Reasoning::Harmony {
        return format!("content: @{ANSWER}\n");
    }
    let [channel, message] = ["<|channel|>", "<|message|>"].map(|text| marker(tokenizer, text));
    format!("content: {channel} \"final\" {message} @{ANSWER}\n")
}

/// What stands before the answer in the first rule, and the rules it takes.
fn before(reasoning: Reasoning, tokenizer: &Tokenizer) -> (&'static str, String) {
    let body = || text_until("reasoning", tokenizer, CLOSE) + "SPACE: /[ \\t\\r\\n]{1,8}/\n";
    match reasoning {
        Reasoning::None => ("", String::new()),
        Reasoning::Open => ("reasoning SPACE? ", body()),
        Reasoning::Think => {
            let open = marker(tokenizer, OPEN);
            (
                "thought? ",
                format!("thought: {open} reasoning SPACE?\n{}", body()),
            )
        }
        Reasoning::Harmony => {
            let [channel, message, start] =
                ["<|channel|>", "<|message|>", "<|start|>"].map(|text| marker(tokenizer, text));
            let body = text_until("reasoning", tokenizer, "<|end|>");
            let rule = format!(
                "analysis: {channel} \"analysis\" {message} reasoning {start} {}\n",
                literal("assistant")
            );
            ("analysis* ", rule + &body)
        }
    }
}
