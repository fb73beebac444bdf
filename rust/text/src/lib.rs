//! Text in and out: tokenizers, chat templates, incremental detokenization and stop strings.
