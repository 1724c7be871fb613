//! Namespaces from which routes and ListenerSets may attach: choices by name and by labels.

use std::collections::BTreeMap;

use canal_model::ids::Namespace;
use canal_model::policy::kubernetes::NamespaceObject;
use canal_model::policy::listeners::{LabelExpression, LabelSelector, NamespaceChoice};
use canal_model::program::Labels;

use crate::Written;

/// Label that Kubernetes gives every namespace: its name.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// The labels of the tenant's namespaces, as far as they have objects.
#[derive(Debug, Default)]
pub(crate) struct NamespaceLabels(BTreeMap<Namespace, Labels>);

impl NamespaceLabels {
    pub(crate) fn new(declared: &[Written<'_, NamespaceObject>]) -> Self {
        let labels = declared.iter().filter_map(|namespace| {
            let metadata = &namespace.object.metadata;
            let name = Namespace::new(metadata.name.as_str()).ok()?;
            // Labels that were rejected may be those that a selector asks for.
            let is_whole = namespace.document.faults.is_empty();
            is_whole.then(|| (name, metadata.labels.clone()))
        });
        Self(labels.collect())
    }
}

/// The namespaces that a listener or a Gateway allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AllowedNamespaces {
    None,
    /// The namespace of the listener's own object.
    Same,
    All,
    Selector(LabelSelector),
}

impl AllowedNamespaces {
    /// Reads a choice; `default` is that of a field that is missing. The error is the problem,
    /// without a full stop.
    pub(crate) fn read(written: &NamespaceChoice, default: Self) -> Result<Self, String> {
        Ok(match (written.from.as_deref(), &written.selector) {
            (None, None) => default,
            (Some("None"), _) => Self::None,
            (Some("Same"), _) => Self::Same,
            (Some("All"), _) => Self::All,
            (Some("Selector"), Some(selector)) => {
                check(selector)?;
                Self::Selector(selector.clone())
            }
            (Some("Selector"), None) => return Err("there is no selector".to_owned()),
            (None, Some(_)) => return Err("a selector needs from: Selector".to_owned()),
            (Some(other), _) => {
                let short: String = other.chars().take(80).collect();
                return Err(format!("{short:?} is not All, Same, Selector or None"));
            }
        })
    }

    /// Returns whether the namespace `from` is allowed by an object in the namespace `own`.
    pub(crate) fn has(&self, own: &Namespace, from: &Namespace, labels: &NamespaceLabels) -> bool {
        match self {
            Self::None => false,
            Self::Same => own == from,
            Self::All => true,
            Self::Selector(selector) => selects(selector, from, labels.0.get(from)),
        }
    }
}

fn check(selector: &LabelSelector) -> Result<(), String> {
    for LabelExpression {
        key,
        operator,
        values,
    } in &selector.match_expressions
    {
        match (operator.as_str(), values.is_empty()) {
            ("In" | "NotIn", false) | ("Exists" | "DoesNotExist", true) => {}
            ("In" | "NotIn", true) => {
                return Err(format!("{operator} of label {key:?} has no values"));
            }
            ("Exists" | "DoesNotExist", false) => {
                return Err(format!("{operator} of label {key:?} has values"));
            }
            _ => {
                let short: String = operator.chars().take(80).collect();
                return Err(format!(
                    "{short:?} is not In, NotIn, Exists or DoesNotExist"
                ));
            }
        }
    }
    Ok(())
}

/// Returns whether a selector holds for a namespace with these labels. One without an object has
/// only the label with its name.
fn selects(selector: &LabelSelector, name: &Namespace, labels: Option<&Labels>) -> bool {
    let value = |key: &str| match labels.and_then(|labels| labels.get(key)) {
        Some(value) => Some(value.as_str()),
        None => (key == NAME_LABEL).then(|| name.as_str()),
    };
    let by_labels = selector
        .match_labels
        .iter()
        .all(|(key, wanted)| value(key) == Some(wanted));
    let by_expressions = selector.match_expressions.iter().all(|expression| {
        let actual = value(&expression.key);
        let is_listed =
            || actual.is_some_and(|actual| expression.values.iter().any(|v| v == actual));
        match expression.operator.as_str() {
            "In" => is_listed(),
            "NotIn" => !is_listed(),
            "Exists" => actual.is_some(),
            "DoesNotExist" => actual.is_none(),
            _ => false,
        }
    });
    by_labels && by_expressions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expression(key: &str, operator: &str, values: &[&str]) -> LabelExpression {
        LabelExpression {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: values.iter().map(|value| (*value).to_owned()).collect(),
        }
    }

    #[test]
    fn selectors_compare_labels_as_kubernetes_does() {
        let name = Namespace::new("shop").unwrap();
        let labels: Labels = [("team".to_owned(), "a".to_owned())].into();
        for (one, expected) in [
            (expression("team", "In", &["a", "b"]), [true, false]),
            (expression("team", "NotIn", &["a"]), [false, true]),
            (expression("team", "Exists", &[]), [true, false]),
            (expression("team", "DoesNotExist", &[]), [false, true]),
            (expression(NAME_LABEL, "In", &["shop"]), [true, true]),
            (expression("team", "Like", &["a"]), [false, false]),
        ] {
            let selector = LabelSelector {
                match_expressions: vec![one.clone()],
                ..LabelSelector::default()
            };
            let found = [
                selects(&selector, &name, Some(&labels)),
                selects(&selector, &name, None),
            ];
            assert_eq!(found, expected, "{one:?}");
        }
        let by_labels = LabelSelector {
            match_labels: labels.clone(),
            ..LabelSelector::default()
        };
        assert!(selects(&by_labels, &name, Some(&labels)));
        assert!(!selects(&by_labels, &name, None));
        // Kubernetes: an empty selector selects everything.
        assert!(selects(&LabelSelector::default(), &name, None));
    }

    #[test]
    fn a_choice_that_cannot_be_read_allows_nothing() {
        let choice = |from: Option<&str>, selector: Option<LabelSelector>| NamespaceChoice {
            from: from.map(str::to_owned),
            selector,
        };
        let read = |from, selector| {
            AllowedNamespaces::read(&choice(from, selector), AllowedNamespaces::Same)
        };
        assert_eq!(read(None, None), Ok(AllowedNamespaces::Same));
        assert_eq!(read(Some("All"), None), Ok(AllowedNamespaces::All));
        assert_eq!(read(Some("None"), None), Ok(AllowedNamespaces::None));
        let broken = LabelSelector {
            match_expressions: vec![expression("a", "In", &[])],
            ..LabelSelector::default()
        };
        for (from, selector) in [
            (Some("Selector"), None),
            (None, Some(LabelSelector::default())),
            (Some("Selector"), Some(broken)),
            (Some("all"), None),
        ] {
            assert!(
                read(from, selector.clone()).is_err(),
                "{from:?} {selector:?}"
            );
        }
    }
}
