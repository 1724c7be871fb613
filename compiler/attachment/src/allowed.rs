//! Namespaces from which routes and ListenerSets may attach: choices by name and by labels.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::ids::Namespace;
use canal_model::policy::kubernetes::NamespaceObject;
use canal_model::policy::listeners::{LabelExpression, LabelSelector, NamespaceChoice};
use canal_model::program::Labels;

use crate::{Written, shorten};

/// Label that Kubernetes gives every namespace: its name.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Maximum number of labels, expressions and values of one selector of namespaces.
/// A comparison of a route with the listener costs as many steps, of the 16,000,000 that a tenant
/// has (`COMPARISONS_PER_TENANT_MAX`). Nobody measured this value.
pub const SELECTOR_PARTS_MAX: usize = 256;

/// Maximum length of a label's name, with its prefix (as in Kubernetes), and of a value.
const LABEL_BYTES_MAX: usize = 253 + 1 + 63;

/// The labels of the tenant's namespaces that have objects. `None` means that they are unknown,
/// because a part of the object was rejected.
#[derive(Debug, Default)]
pub(crate) struct NamespaceLabels(BTreeMap<Namespace, Option<Labels>>);

impl NamespaceLabels {
    pub(crate) fn new(declared: &[Written<'_, NamespaceObject>]) -> Self {
        let labels = declared.iter().filter_map(|namespace| {
            let metadata = &namespace.object.metadata;
            let name = Namespace::new(metadata.name.as_str()).ok()?;
            let is_whole = namespace.document.faults.is_empty();
            Some((name, is_whole.then(|| metadata.labels.clone())))
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
    Listed(BTreeSet<Namespace>),
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
                let problem = "is not All, Same, Selector or None";
                return Err(format!("{:?} {problem}", shorten(other)));
            }
        })
    }

    /// Returns whether the namespace `from` is allowed by an object in the namespace `own`.
    pub(crate) fn has(&self, own: &Namespace, from: &Namespace, labels: &NamespaceLabels) -> bool {
        match self {
            Self::None => false,
            Self::Same => own == from,
            Self::All => true,
            Self::Listed(namespaces) => namespaces.contains(from),
            Self::Selector(selector) => match labels.0.get(from) {
                // A label that was rejected may be one that the selector excludes.
                Some(None) => false,
                Some(Some(labels)) => selects(selector, from, Some(labels)),
                None => selects(selector, from, None),
            },
        }
    }

    /// Adds the namespaces of another list to a list.
    pub(crate) fn widen(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::Listed(own), Self::Listed(others)) => own.extend(others),
            (_, Self::All) => *self = Self::All,
            _ => {}
        }
    }

    /// Returns the number of comparisons that [`Self::has`] makes at most.
    pub(crate) fn comparisons(&self) -> usize {
        match self {
            Self::None | Self::Same | Self::All | Self::Listed(_) => 1,
            Self::Selector(selector) => 1 + parts(selector),
        }
    }
}

/// Returns the number of labels, expressions and values of a selector.
fn parts(selector: &LabelSelector) -> usize {
    let expressions = selector.match_expressions.iter();
    let values = expressions.map(|expression| 1 + expression.values.len());
    selector.match_labels.len() + values.sum::<usize>()
}

/// Checks the operators of a selector, and its limits. The error is the problem.
fn check(selector: &LabelSelector) -> Result<(), String> {
    let count = parts(selector);
    if count > SELECTOR_PARTS_MAX {
        return Err(format!(
            "the selector has {count} labels, expressions and values, more than {SELECTOR_PARTS_MAX}"
        ));
    }
    let labels = selector.match_labels.iter();
    let expressions = selector.match_expressions.iter();
    let keys = labels.clone().map(|(key, _)| key);
    let texts = keys
        .chain(labels.map(|(_, value)| value))
        .chain(expressions.clone().map(|expression| &expression.key))
        .chain(expressions.flat_map(|expression| &expression.values));
    if let Some(long) = texts.into_iter().find(|text| text.len() > LABEL_BYTES_MAX) {
        let short = shorten(long);
        return Err(format!(
            "{short:?} has more than {LABEL_BYTES_MAX} bytes, as no label has"
        ));
    }
    for LabelExpression {
        key,
        operator,
        values,
    } in &selector.match_expressions
    {
        // As in Kubernetes, In and NotIn need values, and the other two have none.
        match (operator.as_str(), values.is_empty()) {
            ("In" | "NotIn", false) | ("Exists" | "DoesNotExist", true) => {}
            ("In" | "NotIn", true) => {
                return Err(format!("{operator} of label {key:?} has no values"));
            }
            ("Exists" | "DoesNotExist", false) => {
                return Err(format!("{operator} of label {key:?} has values"));
            }
            _ => {
                let short = shorten(operator);
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
    let value = |key: &str| {
        // The API server sets this label, whatever the object says.
        if key == NAME_LABEL {
            return Some(name.as_str());
        }
        labels
            .and_then(|labels| labels.get(key))
            .map(String::as_str)
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
        let misnamed: Labels = [(NAME_LABEL.to_owned(), "other".to_owned())].into();
        let by_name = LabelSelector {
            match_labels: misnamed.clone(),
            ..LabelSelector::default()
        };
        assert!(!selects(&by_name, &name, Some(&misnamed)));
        // Kubernetes: an empty selector selects everything.
        assert!(selects(&LabelSelector::default(), &name, None));
    }

    #[test]
    fn no_selector_chooses_a_namespace_whose_labels_are_unknown() {
        let name = Namespace::new("shop").unwrap();
        let selector = LabelSelector {
            match_expressions: vec![expression("team", "DoesNotExist", &[])],
            ..LabelSelector::default()
        };
        let allowed = AllowedNamespaces::Selector(selector);
        let labels = |labels| NamespaceLabels([(name.clone(), labels)].into());
        assert!(allowed.has(&name, &name, &labels(Some(Labels::new()))));
        assert!(!allowed.has(&name, &name, &labels(None)));
    }

    #[test]
    fn selectors_beyond_the_limits_are_refused() {
        let values = vec!["a"; SELECTOR_PARTS_MAX];
        let long = "a".repeat(LABEL_BYTES_MAX + 1);
        for (one, is_within) in [
            (expression("a", "In", &values[1..]), true),
            (expression("a", "In", &values), false),
            (expression("a", "In", &[&long[1..]]), true),
            (expression("a", "In", &[&long]), false),
            (expression(&long, "Exists", &[]), false),
        ] {
            let selector = LabelSelector {
                match_expressions: vec![one],
                ..LabelSelector::default()
            };
            let found = check(&selector);
            assert_eq!(found.is_ok(), is_within, "{found:?}");
        }
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
