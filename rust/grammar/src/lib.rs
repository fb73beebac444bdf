//! Grammars for outputs: what users and forced tool calls ask for, compiled by llguidance, and the tokens it leaves.
//!
//! Knows a tokenizer and texts; must not know requests, steps or the protocol around a field.
#![forbid(unsafe_code)]

pub mod calls;
pub mod compiler;
pub mod constraint;
mod lark;
mod limits;
pub mod matcher;
pub mod reasoning;
mod vocabulary;
