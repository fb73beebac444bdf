//! Everything about the engine process that the protocol need not know: its life, the requests in it, and who killed it.

mod blame;
mod registry;
mod supervisor;

pub(crate) use registry::{
    Event, NewRequest, News, Registry, RequestGrammar, SubmitError, Ticket, prompt_lengths,
};
pub use supervisor::SupervisorError;
pub(crate) use supervisor::{Death, Listener, Supervisor};
