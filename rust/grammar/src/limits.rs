//! What a grammar may cost: bytes of its source, work of its compilation, work and memory of its masks.

use std::time::Duration;

use llguidance::api::ParserLimits;

/// Bytes of a grammar's source at most.
pub(crate) const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Brackets inside each other, in a part that is no JSON.
pub(crate) const MAX_DEPTH: usize = 64;
/// Stack of a thread that compiles: schemas and expressions are walked by recursion, as deep as the limits allow.
pub(crate) const STACK_BYTES: usize = 64 << 20;
/// Threads that compile.
pub(crate) const NUM_THREADS: usize = 2;
/// Grammars that may wait to be compiled.
pub(crate) const MAX_WAITING: usize = 64;
/// Compiled grammars, and errors, that are kept.
pub(crate) const MAX_CACHED: usize = 128;
/// How long a caller waits for a compilation.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// llguidance's own limits; its defaults let one mask take up to 20 ms and one lexer half a gigabyte.
pub(crate) fn parser() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        max_lexer_states: 50_000,
        max_grammar_size: 500_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}
