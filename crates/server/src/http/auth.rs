//! The API key. Comparing takes the same time whatever was sent.

use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::protocol::ApiError;

/// The hash of a key: of equal length for all keys, and useless to whoever reads our memory.
#[derive(Clone)]
pub(crate) struct ApiKey([u8; 32]);

impl ApiKey {
    pub(crate) fn new(key: &str) -> ApiKey {
        ApiKey(Sha256::digest(key.as_bytes()).into())
    }

    /// Refuses requests that do not show the key.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let bearer = bearer.and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
        });
        let shown = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
        let Some(shown) = shown else {
            return Err(refused("there is no API key; send it as `Authorization: Bearer KEY`"));
        };
        if self.is(shown) { Ok(()) } else { Err(refused("the API key is wrong")) }
    }

    fn is(&self, key: &[u8]) -> bool {
        let hash = Sha256::digest(key.trim_ascii());
        let differences = hash.iter().zip(&self.0).fold(0u8, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differences) == 0
    }
}

fn refused(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(header: &'static str, value: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header, value.parse().unwrap());
        ApiKey::new("secret").check(&headers).is_ok()
    }

    #[test]
    fn only_the_key_is_taken() {
        assert!(check("authorization", "Bearer secret") && check("authorization", "bearer secret"));
        assert!(check("x-api-key", "secret"));
        for bad in ["Bearer secre", "Bearer secrets", "Bearer ", "Basic secret", "secret", "Bearer Secret"] {
            assert!(!check("authorization", bad), "{bad}");
        }
        assert!(ApiKey::new("secret").check(&HeaderMap::new()).is_err());
    }
}
