//! Table of the fields of a DestinationRule that Canal does not implement. It decides nothing.

use std::borrow::Cow;

use canal_model::policy::ObjectKind;
use canal_yaml::tree::{YamlNode, YamlValue};

use super::{Harmless, KEEP_OR_REMOVE, KnownField, REMOVE, left_out, never, unless};

pub(super) const DESTINATION_RULE: [KnownField; 12] = [
    unless(
        "spec.exportTo",
        "*",
        "a limited audience is not supported in this version",
        "remove the field",
    ),
    never(
        "spec.workloadSelector",
        "rules for some clients only are not supported in this version",
        REMOVE,
    ),
    KnownField {
        pattern: "trafficPolicy.tls",
        harmless: Harmless::If(is_mutual_tls_of_mesh),
        problem: "TLS settings other than those of the mesh are not supported in this version",
        fix: "write only mode: ISTIO_MUTUAL, or remove the field",
    },
    never(
        "trafficPolicy.tunnel",
        "tunnels to a proxy are not supported in this version",
        REMOVE,
    ),
    never(
        "trafficPolicy.proxyProtocol",
        "the PROXY protocol towards endpoints is not supported in this version",
        REMOVE,
    ),
    left_out(
        "trafficPolicy.connectionPool",
        "limits on connections and requests of a service are not supported in this version",
        KEEP_OR_REMOVE,
    ),
    left_out(
        "trafficPolicy.outlierDetection",
        "ejecting endpoints by their responses is not supported in this version; those that cannot be connected to are ejected",
        KEEP_OR_REMOVE,
    ),
    left_out(
        "trafficPolicy.retryBudget",
        "a retry budget of a service's own is not supported in this version; the default budget applies",
        KEEP_OR_REMOVE,
    ),
    left_out(
        "trafficPolicy.loadBalancer.localityLbSetting",
        "preferences among localities are not supported in this version",
        KEEP_OR_REMOVE,
    ),
    left_out("trafficPolicy.loadBalancer.warmup", WARM_UP, KEEP_OR_REMOVE),
    left_out(
        "trafficPolicy.loadBalancer.warmupDurationSecs",
        WARM_UP,
        KEEP_OR_REMOVE,
    ),
    left_out(
        "trafficPolicy.loadBalancer.consistentHash.httpCookie.attributes",
        "attributes of the generated cookie are not supported in this version",
        KEEP_OR_REMOVE,
    ),
];

const WARM_UP: &str =
    "new endpoints do not warm up in this version; they get their full part at once";

/// Returns the pattern of a field under which its table has it. Of a DestinationRule, the four traffic policies of a rule
/// (of the host, of a subset, and of a port of each) have the same fields.
pub(super) fn pattern_in_table(kind: ObjectKind, pattern: &str) -> Cow<'_, str> {
    if kind != ObjectKind::DestinationRule {
        return pattern.into();
    }
    let of_subset = pattern.strip_prefix("spec.subsets[].trafficPolicy.");
    let Some(field) = of_subset.or_else(|| pattern.strip_prefix("spec.trafficPolicy.")) else {
        return pattern.into();
    };
    let field = field.strip_prefix("portLevelSettings[].").unwrap_or(field);
    format!("trafficPolicy.{field}").into()
}

/// Returns true if the TLS settings only say what the mesh does anyway.
fn is_mutual_tls_of_mesh(settings: &YamlNode) -> bool {
    matches!(&settings.value, YamlValue::Map(fields) if fields.len() == 1)
        && settings.field("mode").and_then(YamlNode::text) == Some("ISTIO_MUTUAL")
}

#[cfg(test)]
mod tests {
    use super::super::{FieldVerdict, classify_field};
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Outcome {
        Noise,
        LeftOut,
        Refused,
        Unknown,
    }

    #[test]
    fn fields_of_traffic_policies_are_judged_alike_at_every_place() {
        use Outcome::{LeftOut, Noise, Refused, Unknown};
        for place in [
            "spec.trafficPolicy",
            "spec.trafficPolicy.portLevelSettings[]",
            "spec.subsets[].trafficPolicy",
            "spec.subsets[].trafficPolicy.portLevelSettings[]",
        ] {
            for (field, value, expected) in [
                ("tls", "{mode: ISTIO_MUTUAL}", Noise),
                ("tls", "{mode: ISTIO_MUTUAL, sni: a}", Refused),
                ("tls", "{mode: SIMPLE}", Refused),
                ("tls", "{mode: DISABLE}", Refused),
                ("tunnel", "{}", Refused),
                ("proxyProtocol", "{version: V2}", Refused),
                ("connectionPool", "{}", LeftOut),
                ("outlierDetection", "{}", LeftOut),
                ("retryBudget", "{}", LeftOut),
                ("loadBalancer.localityLbSetting", "{}", LeftOut),
                ("loadBalancer.warmup", "{}", LeftOut),
                ("loadBalancer.warmupDurationSecs", "5s", LeftOut),
                ("loadBalancer.speed", "5", Unknown),
            ] {
                let node = canal_yaml::tree::parse(value).unwrap();
                let pattern = format!("{place}.{field}");
                let verdict = classify_field(ObjectKind::DestinationRule, &pattern, Some(&node));
                let outcome = match verdict {
                    FieldVerdict::Noise => Noise,
                    FieldVerdict::LeftOut { .. } => LeftOut,
                    FieldVerdict::Refused { .. } => Refused,
                    FieldVerdict::Unknown => Unknown,
                };
                assert_eq!(outcome, expected, "{pattern}: {value}");
            }
        }
    }
}
