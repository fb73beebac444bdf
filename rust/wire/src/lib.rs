//! What the front and an engine process say to each other: typed messages, and the frames that carry them.
//!
//! Token ids only, no text but that of a grammar. A frame is a length (`u32`, little-endian) and one MessagePack value. The engine's first message is
//! [`FromEngine::Hello`]; a front hangs up on a version that is not its own.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod frame;
mod grammar;
pub mod journal;
mod message;
mod state;

pub use frame::{Decoder, MAX_FRAME_BYTES, WireError, encode};
pub use grammar::{GrammarPart, GrammarSource, Syntax};
pub use message::{
    AddRequest, ChoiceUpdate, Finish, FromEngine, ModelInfo, PositionLogprobs, Progress,
    SamplingDefaults, ToEngine, Update,
};
pub use state::{EngineState, PoolMap, StepRecord, TreeEdge, TreeView};

/// Changes with every change of a message.
pub const VERSION: u32 = 2;
