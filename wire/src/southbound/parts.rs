//! Joins the parts of a response (`DeltaDiscoveryResponse.more_parts`) into one. It neither applies
//! resources nor answers.

use prost::Message;

use crate::MESSAGE_BYTES_MAX;
use crate::discovery::DeltaDiscoveryResponse;

/// The received parts of a response whose last part has not come.
#[derive(Debug, Default)]
pub struct ResponseJoiner {
    joined: Option<DeltaDiscoveryResponse>,
    bytes: usize,
}

/// The parts of a response do not fit together, or are too large; the stream cannot go on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponsePartError {
    /// A part has another nonce or type than the parts before it.
    #[error(
        "the controller sent response {second} before the last part of response {first}; fix: run a released build of the controller"
    )]
    Mixed { first: String, second: String },
    /// The parts together are larger than a response may be.
    #[error(
        "a response has more than {limit} bytes in all its parts; fix: lower spec.shares.compiledBytes of the largest Tenant"
    )]
    TooLarge { limit: usize },
}

impl ResponseJoiner {
    /// Adds a message of the stream. Returns the response if this is its last or only part.
    ///
    /// # Errors
    /// Fails with [`ResponsePartError`] if the part does not continue the parts before it, or if
    /// all parts have more than [`MESSAGE_BYTES_MAX`] bytes.
    pub fn add(
        &mut self,
        part: DeltaDiscoveryResponse,
    ) -> Result<Option<DeltaDiscoveryResponse>, ResponsePartError> {
        let has_more = part.more_parts;
        if !has_more && self.joined.is_none() {
            return Ok(Some(part));
        }
        self.bytes = self.bytes.saturating_add(part.encoded_len());
        if self.bytes > MESSAGE_BYTES_MAX {
            return Err(ResponsePartError::TooLarge {
                limit: MESSAGE_BYTES_MAX,
            });
        }
        let joined = match self.joined.take() {
            None => part,
            Some(first) => join(first, part)?,
        };
        if has_more {
            self.joined = Some(joined);
            return Ok(None);
        }
        self.bytes = 0;
        Ok(Some(DeltaDiscoveryResponse {
            more_parts: false,
            ..joined
        }))
    }
}

fn join(
    mut first: DeltaDiscoveryResponse,
    part: DeltaDiscoveryResponse,
) -> Result<DeltaDiscoveryResponse, ResponsePartError> {
    if (&first.nonce, &first.type_url) != (&part.nonce, &part.type_url) {
        return Err(ResponsePartError::Mixed {
            first: first.nonce,
            second: part.nonce,
        });
    }
    first.resources.extend(part.resources);
    first.removed_resources.extend(part.removed_resources);
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::Resource;

    fn part(nonce: &str, name: &str, more_parts: bool) -> DeltaDiscoveryResponse {
        DeltaDiscoveryResponse {
            nonce: nonce.into(),
            resources: vec![Resource {
                name: name.into(),
                ..Resource::default()
            }],
            removed_resources: vec![format!("old-{name}")],
            more_parts,
            ..DeltaDiscoveryResponse::default()
        }
    }

    #[test]
    fn the_last_part_completes_the_response() {
        let mut joiner = ResponseJoiner::default();
        let only = part("1", "a", false);
        assert_eq!(joiner.add(only.clone()), Ok(Some(only)));
        assert_eq!(joiner.add(part("2", "a", true)), Ok(None));
        assert_eq!(joiner.add(part("2", "b", true)), Ok(None));
        let response = joiner.add(part("2", "c", false)).unwrap().unwrap();
        let names: Vec<_> = response.resources.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(response.removed_resources, ["old-a", "old-b", "old-c"]);
        assert!(!response.more_parts);
        // The next response begins anew.
        let next = part("3", "d", false);
        assert_eq!(joiner.add(next.clone()), Ok(Some(next)));
        assert_eq!(joiner.bytes, 0);
    }

    #[test]
    fn parts_of_two_responses_are_not_joined() {
        for (nonce, type_url) in [("2", ""), ("1", "other")] {
            let mut joiner = ResponseJoiner::default();
            assert_eq!(joiner.add(part("1", "a", true)), Ok(None));
            let other = DeltaDiscoveryResponse {
                type_url: type_url.into(),
                ..part(nonce, "b", false)
            };
            let mixed = joiner.add(other).unwrap_err();
            assert!(
                matches!(mixed, ResponsePartError::Mixed { .. }),
                "{nonce} {type_url}: {mixed}"
            );
        }
    }

    #[test]
    fn all_parts_together_are_limited() {
        let mut joiner = ResponseJoiner {
            bytes: MESSAGE_BYTES_MAX - 100,
            joined: Some(part("1", "a", true)),
        };
        let large = part("1", &"b".repeat(100), true);
        assert_eq!(
            joiner.add(large),
            Err(ResponsePartError::TooLarge {
                limit: MESSAGE_BYTES_MAX
            })
        );
    }
}
