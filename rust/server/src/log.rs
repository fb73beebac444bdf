//! What an operator reads: one line on standard error for each thing that happened.

/// Writes a line; a closed standard error is no reason to stop serving.
pub(crate) fn say(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "octavo: {line}");
}
