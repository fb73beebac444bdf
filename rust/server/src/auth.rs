//! API keys: every route but the public ones is closed without one.

use axum::http::{HeaderMap, header};
use subtle::{Choice, ConstantTimeEq};

/// Bytes of a key at most: all comparisons are of this many, so that their time tells nothing.
pub(crate) const MAX_KEY_BYTES: usize = 256;

/// The keys that open the server.
#[derive(Debug, Default)]
pub(crate) struct ApiKeys {
    keys: Vec<Padded>,
}

#[derive(Debug)]
struct Padded {
    bytes: [u8; MAX_KEY_BYTES],
    length: u64,
}

impl Padded {
    fn new(key: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_KEY_BYTES];
        bytes.get_mut(..key.len())?.copy_from_slice(key);
        Some(Self {
            bytes,
            length: key.len() as u64,
        })
    }

    fn matches(&self, other: &Self) -> Choice {
        self.bytes.ct_eq(&other.bytes) & self.length.ct_eq(&other.length)
    }
}

impl ApiKeys {
    /// None if a key is empty or longer than [`MAX_KEY_BYTES`].
    pub(crate) fn new(keys: &[String]) -> Option<Self> {
        let padded = keys
            .iter()
            .map(|key| Padded::new(key.as_bytes()).filter(|_| !key.is_empty()));
        Some(Self {
            keys: padded.collect::<Option<_>>()?,
        })
    }

    /// The number of the key that a request shows, or 0 if none is needed; none if it shows no right one.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Option<u64> {
        if self.keys.is_empty() {
            return Some(0);
        }
        let given = Padded::new(shown_key(headers)?)?;
        let mut found = None;
        // All of them are looked at, whichever it is.
        for (number, key) in (1..).zip(&self.keys) {
            if bool::from(key.matches(&given)) {
                found = Some(number);
            }
        }
        found
    }
}

/// The key of `Authorization: Bearer`, or of `x-api-key` as Anthropic's clients send it.
fn shown_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then_some(key);
    }
    headers.get("x-api-key").map(|value| value.as_bytes())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
        headers
    }

    #[test]
    fn a_key_opens_and_everything_else_does_not() {
        let keys = ApiKeys::new(&["secret".to_owned(), "other".to_owned()]).unwrap();
        assert_eq!(
            keys.check(&headers("authorization", "Bearer secret")),
            Some(1)
        );
        assert_eq!(
            keys.check(&headers("authorization", "bearer other")),
            Some(2)
        );
        assert_eq!(keys.check(&headers("x-api-key", "other")), Some(2));
        for wrong in [
            "Bearer secre",
            "Bearer secret ",
            "Bearer ",
            "secret",
            "Basic secret",
            "Bearer secret\u{e9}",
        ] {
            assert_eq!(
                keys.check(&headers("authorization", wrong)),
                None,
                "{wrong:?}"
            );
        }
        assert_eq!(
            keys.check(&headers(
                "authorization",
                &format!("Bearer {}", "x".repeat(300))
            )),
            None
        );
        assert_eq!(keys.check(&HeaderMap::new()), None);
    }

    #[test]
    fn without_keys_everybody_may() {
        assert_eq!(ApiKeys::default().check(&HeaderMap::new()), Some(0));
    }

    #[test]
    fn a_padded_key_is_not_one_with_zeros_behind_it() {
        let keys = ApiKeys::new(&["a".to_owned()]).unwrap();
        assert!(!bool::from(
            keys.keys[0].matches(&Padded::new(b"a\0").unwrap())
        ));
        assert!(ApiKeys::new(&[String::new()]).is_none());
    }
}
