//! Threads around `octavo-core`: queues in, outputs out.
