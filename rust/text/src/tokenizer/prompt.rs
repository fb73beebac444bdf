//! Encoding of rendered prompts, in which only the template's own special tokens are special.

use tokenizers::{Normalizer, NormalizerWrapper};

use super::{Tokenizer, TokenizerError};
use crate::template::Prompt;

impl Tokenizer {
    /// The ids of a rendered chat prompt; the template places BOS and the like itself, so nothing is added.
    ///
    /// Special tokens are recognised except across [`Prompt::breaks`]; broken ones are encoded together with the text
    /// around them, exactly as plain text is.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, TokenizerError> {
        if prompt.breaks.is_empty() {
            return self.encode_unprefixed(&prompt.text);
        }
        let failed = |error: tokenizers::Error| TokenizerError::Encode {
            reason: error.to_string(),
        };
        let (marked, marker) = prompt.marked();
        let added = self.inner.get_added_vocabulary();
        // Markers must be there when added tokens are looked for, and gone before anything else sees the text.
        let mut pieces = added.extract_and_normalize(None::<&NormalizerWrapper>, &marked);
        pieces
            .normalize(|piece| {
                piece.replace(marker, "")?;
                self.inner
                    .get_normalizer()
                    .map_or(Ok(()), |normalizer| normalizer.normalize(piece))
            })
            .map_err(failed)?;
        let mut ids = Vec::new();
        self.encode_pieces(pieces, &mut ids)?;
        Ok(ids)
    }

    fn encode_unprefixed(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let added = self.inner.get_added_vocabulary();
        let pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        let mut ids = Vec::new();
        self.encode_pieces(pieces, &mut ids)?;
        Ok(ids)
    }
}
