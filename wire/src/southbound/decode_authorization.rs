//! Converts wire messages of policies to `canal_model::authorization`. Anything that this build
//! does not know is refused: a guess would fail open.

use std::collections::BTreeMap;
use std::time::Duration;

use canal_model::authorization as a;
use canal_model::ids::ServiceKey;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

impl DecodeContext<'_> {
    pub(super) fn at_most(
        &self,
        field: &'static str,
        count: usize,
        most: usize,
    ) -> Result<(), ResourceDecodeError> {
        if count > most {
            self.err(field, format!("{count} entries, more than {most}"))
        } else {
            Ok(())
        }
    }
    pub(super) fn bytes(
        &self,
        field: &'static str,
        text: &str,
        most: usize,
    ) -> Result<(), ResourceDecodeError> {
        if text.len() > most {
            self.err(field, format!("{} bytes, more than {most}", text.len()))
        } else {
            Ok(())
        }
    }
    pub(super) fn broken(
        &self,
        reason: Option<String>,
    ) -> Result<Option<String>, ResourceDecodeError> {
        reason
            .iter()
            .try_for_each(|r| self.bytes("broken", r, a::REASON_BYTES_MAX))?;
        Ok(reason)
    }
    fn text(&self, field: &'static str, text: String) -> Result<String, ResourceDecodeError> {
        self.bytes(field, &text, a::VALUE_BYTES_MAX)?;
        Ok(text)
    }
    /// Checks that a text is not empty and not longer than a value may be.
    fn word(&self, field: &'static str, text: String) -> Result<String, ResourceDecodeError> {
        if text.is_empty() {
            self.err(field, "is empty")
        } else {
            self.text(field, text)
        }
    }
    fn texts(
        &self,
        field: &'static str,
        texts: Vec<String>,
    ) -> Result<Vec<String>, ResourceDecodeError> {
        self.at_most(field, texts.len(), a::VALUES_MAX)?;
        texts.into_iter().map(|t| self.word(field, t)).collect()
    }
    /// Checks the name of a header (RFC 9110 §5.1), which has to be in lower case. HTTP/2
    /// pseudo-headers are allowed.
    fn header(&self, field: &'static str, name: String) -> Result<String, ResourceDecodeError> {
        let name = self.word(field, name)?;
        let is_tchar = |b: u8| {
            (b.is_ascii_alphanumeric() && !b.is_ascii_uppercase())
                || b"!#$%&'*+-.^_`|~".contains(&b)
        };
        if name.bytes().all(is_tchar)
            || name == ":authority"
            || name == ":method"
            || name == ":path"
        {
            Ok(name)
        } else {
            self.err(
                field,
                format!("{name:?} is not a header's name in lower case"),
            )
        }
    }
    fn policy(
        &self,
        field: &'static str,
        key: Option<w::PolicyKey>,
    ) -> Result<a::PolicyKey, ResourceDecodeError> {
        let key = self.need(field, key)?;
        Ok(a::PolicyKey {
            tenant: self.name(field, &key.tenant)?,
            namespace: self.name(field, &key.namespace)?,
            name: self.name(field, &key.name)?,
        })
    }
    fn own_service(
        &self,
        field: &'static str,
        of: &a::PolicyKey,
        key: Option<w::ServiceKey>,
    ) -> Result<ServiceKey, ResourceDecodeError> {
        let service = self.key(field, key)?;
        if service.tenant == of.tenant {
            Ok(service)
        } else {
            self.err(field, format!("{service} belongs to another tenant"))
        }
    }
    fn target(
        &self,
        of: &a::PolicyKey,
        target: Option<w::PolicyTarget>,
    ) -> Result<a::PolicyTarget, ResourceDecodeError> {
        use w::policy_target::Target;
        Ok(match self.need("target", target.and_then(|t| t.target))? {
            Target::Tenant(_) => a::PolicyTarget::Tenant,
            Target::Namespace(namespace) => {
                a::PolicyTarget::Namespace(self.name("target.namespace", &namespace)?)
            }
            Target::Workloads(w) if w.labels.is_empty() => {
                return self.err("target.workloads.labels", "is empty");
            }
            Target::Workloads(w) => a::PolicyTarget::Workloads {
                namespace: (!w.namespace.is_empty())
                    .then(|| self.name("target.workloads.namespace", &w.namespace))
                    .transpose()?,
                labels: w.labels,
            },
            Target::Service(key) => {
                a::PolicyTarget::Service(self.own_service("target.service", of, Some(key))?)
            }
        })
    }
}

fn attribute(
    at: &DecodeContext<'_>,
    attribute: Option<w::Attribute>,
) -> Result<a::Attribute, ResourceDecodeError> {
    use w::attribute::Kind;
    const FIELD: &str = "rules.attribute";
    let attribute = at.need(FIELD, attribute)?;
    // An unknown attribute must not be skipped: the policy would match more than its author wrote.
    let Ok(kind) = Kind::try_from(attribute.kind) else {
        return at.err(
            FIELD,
            format!("number {} is not known to this build", attribute.kind),
        );
    };
    let mut path = attribute.path;
    let named = match kind {
        Kind::RequestClaim => {
            at.at_most("rules.attribute.path", path.len(), a::CLAIM_DEPTH_MAX)?;
            let path: Vec<String> = path
                .into_iter()
                .map(|p| at.word("rules.attribute.path", p))
                .collect::<Result<_, _>>()?;
            return if path.is_empty() {
                at.err(FIELD, "a claim without a path")
            } else {
                Ok(a::Attribute::RequestClaim(path))
            };
        }
        Kind::Header => {
            let (Some(name), true) = (path.pop(), path.is_empty()) else {
                return at.err(FIELD, "a header needs one name");
            };
            return Ok(a::Attribute::Header(at.header(FIELD, name)?));
        }
        Kind::Nothing => return at.err(FIELD, "is missing, or not known to this build"),
        Kind::SourcePrincipal => a::Attribute::SourcePrincipal,
        Kind::SourceNamespace => a::Attribute::SourceNamespace,
        Kind::SourceServiceAccount => a::Attribute::SourceServiceAccount,
        Kind::SourceAddress => a::Attribute::SourceAddress,
        Kind::RemoteAddress => a::Attribute::RemoteAddress,
        Kind::RequestPrincipal => a::Attribute::RequestPrincipal,
        Kind::RequestAudience => a::Attribute::RequestAudience,
        Kind::RequestPresenter => a::Attribute::RequestPresenter,
        Kind::Host => a::Attribute::Host,
        Kind::Method => a::Attribute::Method,
        Kind::Path => a::Attribute::Path,
        Kind::DestinationPort => a::Attribute::DestinationPort,
        Kind::DestinationAddress => a::Attribute::DestinationAddress,
        Kind::ServerName => a::Attribute::ServerName,
    };
    // A path that is ignored would change what the policy means.
    if path.is_empty() {
        Ok(named)
    } else {
        at.err(FIELD, "has a path, but is neither a claim nor a header")
    }
}

/// Decodes one match. A match that can never hold for its attribute would make a `none` hold
/// always, so it is refused.
fn one_match(
    at: &DecodeContext<'_>,
    attribute: &a::Attribute,
    m: w::Match,
) -> Result<a::AttributeMatch, ResourceDecodeError> {
    use w::r#match::Match;
    const FIELD: &str = "rules.match";
    let m = match at.need(FIELD, m.r#match)? {
        Match::Exact(s) => a::AttributeMatch::Exact(at.text(FIELD, s)?),
        Match::Prefix(s) => a::AttributeMatch::Prefix(at.text(FIELD, s)?),
        Match::Suffix(s) => a::AttributeMatch::Suffix(at.text(FIELD, s)?),
        Match::Present(_) => a::AttributeMatch::Present,
        Match::Template(s) => a::AttributeMatch::Template(at.word(FIELD, s)?),
        Match::Network(s) => a::AttributeMatch::Network(
            s.parse()
                .or_else(|_| at.err(FIELD, format!("{s:?} is not a CIDR")))?,
        ),
        Match::Port(n) => a::AttributeMatch::Port(at.port(FIELD, n)?),
    };
    if m.fits(attribute) {
        Ok(m)
    } else {
        at.err(FIELD, format!("{m:?} cannot match {attribute:?}"))
    }
}

fn all(
    at: &DecodeContext<'_>,
    field: &'static str,
    all: w::All,
) -> Result<a::AllOf, ResourceDecodeError> {
    at.at_most(field, all.clauses.len(), a::CLAUSES_MAX)?;
    let clause = |c: w::Clause| {
        at.at_most(field, c.any.len() + c.none.len(), a::VALUES_MAX)?;
        if c.any.is_empty() && c.none.is_empty() {
            return at.err(field, "a clause without matches");
        }
        let attribute = attribute(at, c.attribute)?;
        let read = |list: Vec<w::Match>| {
            list.into_iter()
                .map(|m| one_match(at, &attribute, m))
                .collect::<Result<_, ResourceDecodeError>>()
        };
        Ok(a::Clause {
            any: read(c.any)?,
            none: read(c.none)?,
            attribute: attribute.clone(),
        })
    };
    all.clauses.into_iter().map(clause).collect()
}

fn rule(at: &DecodeContext<'_>, r: w::Rule) -> Result<a::PolicyRule, ResourceDecodeError> {
    at.at_most("rules.from", r.from.len(), a::ALTERNATIVES_MAX)?;
    at.at_most("rules.to", r.to.len(), a::ALTERNATIVES_MAX)?;
    Ok(a::PolicyRule {
        from: r
            .from
            .into_iter()
            .map(|x| all(at, "rules.from", x))
            .collect::<Result<_, _>>()?,
        to: r
            .to
            .into_iter()
            .map(|x| all(at, "rules.to", x))
            .collect::<Result<_, _>>()?,
        when: all(at, "rules.when", r.when.unwrap_or_default())?,
    })
}

pub(super) fn authorization(
    name: &str,
    p: w::Authorization,
) -> Result<a::Authorization, ResourceDecodeError> {
    use w::authorization::Action;
    let at = DecodeContext(name);
    let key = at.policy("key", p.key)?;
    let action = match at.need("action", p.action)? {
        Action::Allow(_) => a::AuthorizationAction::Allow,
        Action::Deny(_) => a::AuthorizationAction::Deny,
        Action::Audit(_) => a::AuthorizationAction::Audit,
        Action::Custom(authorizer) => {
            let authorizer = at.policy("action.custom", Some(authorizer))?;
            if authorizer.tenant != key.tenant {
                return at.err(
                    "action.custom",
                    format!("{authorizer} belongs to another tenant"),
                );
            }
            a::AuthorizationAction::Custom(authorizer)
        }
    };
    at.at_most("rules", p.rules.len(), a::RULES_MAX)?;
    Ok(a::Authorization {
        target: at.target(&key, p.target)?,
        action,
        rules: p
            .rules
            .into_iter()
            .map(|r| rule(&at, r))
            .collect::<Result<_, _>>()?,
        dry_run: p.dry_run,
        broken: at.broken(p.broken)?,
        key,
    })
}

fn jwt_rule(at: &DecodeContext<'_>, r: w::JwtRule) -> Result<a::JwtRule, ResourceDecodeError> {
    r.keys
        .iter()
        .try_for_each(|keys| at.bytes("rules.keys", keys, a::KEYS_BYTES_MAX))?;
    at.at_most("rules.headers", r.headers.len(), a::VALUES_MAX)?;
    at.at_most("rules.claim_headers", r.claim_headers.len(), a::VALUES_MAX)?;
    let header = |h: w::jwt_rule::Header| {
        Ok((
            at.header("rules.headers", h.name)?,
            at.text("rules.headers.prefix", h.prefix)?,
        ))
    };
    let claim = |c: w::jwt_rule::ClaimHeader| {
        at.at_most("rules.claim_headers", c.claim.len(), a::CLAIM_DEPTH_MAX)?;
        if c.claim.is_empty() {
            return at.err("rules.claim_headers", "a claim without a path");
        }
        Ok((
            at.header("rules.claim_headers", c.name)?,
            at.texts("rules.claim_headers", c.claim)?,
        ))
    };
    Ok(a::JwtRule {
        issuer: at.word("rules.issuer", r.issuer)?,
        audiences: at.texts("rules.audiences", r.audiences)?,
        keys: r.keys,
        headers: r
            .headers
            .into_iter()
            .map(header)
            .collect::<Result<_, ResourceDecodeError>>()?,
        parameters: at.texts("rules.parameters", r.parameters)?,
        cookies: at.texts("rules.cookies", r.cookies)?,
        forward: r.forward,
        payload_header: r
            .payload_header
            .map(|h| at.header("rules.payload_header", h))
            .transpose()?,
        claim_headers: r
            .claim_headers
            .into_iter()
            .map(claim)
            .collect::<Result<_, ResourceDecodeError>>()?,
    })
}

pub(super) fn authentication(
    name: &str,
    p: w::Authentication,
) -> Result<a::Authentication, ResourceDecodeError> {
    let at = DecodeContext(name);
    let key = at.policy("key", p.key)?;
    at.at_most("rules", p.rules.len(), a::JWT_RULES_MAX)?;
    Ok(a::Authentication {
        target: at.target(&key, p.target)?,
        rules: p
            .rules
            .into_iter()
            .map(|r| jwt_rule(&at, r))
            .collect::<Result<_, _>>()?,
        broken: at.broken(p.broken)?,
        key,
    })
}

fn mode(
    at: &DecodeContext<'_>,
    field: &'static str,
    m: i32,
) -> Result<Option<a::PeerMode>, ResourceDecodeError> {
    use w::peer_authentication::Mode;
    Ok(match Mode::try_from(m) {
        Ok(Mode::Unset) => None,
        Ok(Mode::Strict) => Some(a::PeerMode::Strict),
        Ok(Mode::Permissive) => Some(a::PeerMode::Permissive),
        Ok(Mode::Disable) => Some(a::PeerMode::Disable),
        Err(e) => return at.err(field, e),
    })
}

pub(super) fn peer_authentication(
    name: &str,
    p: w::PeerAuthentication,
) -> Result<a::PeerAuthentication, ResourceDecodeError> {
    let at = DecodeContext(name);
    let key = at.policy("key", p.key)?;
    at.at_most("ports", p.ports.len(), a::VALUES_MAX)?;
    let port = |(port, m): (u32, i32)| {
        Ok((
            at.port("ports", port)?,
            at.need("ports", mode(&at, "ports", m)?)?,
        ))
    };
    Ok(a::PeerAuthentication {
        target: at.target(&key, p.target)?,
        mode: mode(&at, "mode", p.mode)?,
        ports: p
            .ports
            .into_iter()
            .map(port)
            .collect::<Result<BTreeMap<_, _>, ResourceDecodeError>>()?,
        created: p.created,
        key,
    })
}

pub(super) fn authorizer(
    name: &str,
    x: w::Authorizer,
) -> Result<a::Authorizer, ResourceDecodeError> {
    let at = DecodeContext(name);
    let key = at.policy("key", x.key)?;
    let timeout = Duration::from_millis(x.timeout_ms.into());
    // With 0 every check would fail at once.
    if timeout.is_zero() || timeout > a::AUTHORIZER_TIMEOUT_MAX {
        return at.err(
            "timeout_ms",
            format!(
                "{} is not 1 to {}",
                x.timeout_ms,
                a::AUTHORIZER_TIMEOUT_MAX.as_millis()
            ),
        );
    }
    if x.body_bytes > a::AUTHORIZER_BODY_BYTES_MAX {
        return at.err(
            "body_bytes",
            format!(
                "{} is more than {}",
                x.body_bytes,
                a::AUTHORIZER_BODY_BYTES_MAX
            ),
        );
    }
    at.at_most("headers", x.headers.len(), a::VALUES_MAX)?;
    Ok(a::Authorizer {
        service: at.own_service("service", &key, x.service)?,
        port: at.port("port", x.port)?,
        timeout,
        fail_open: x.fail_open,
        headers: x
            .headers
            .into_iter()
            .map(|h| at.header("headers", h))
            .collect::<Result<_, _>>()?,
        body_bytes: x.body_bytes,
        key,
    })
}
