//! Describes why the rules of one policy matched or not. It decides nothing about the request.
//! Start with [`explain_policies`].

use canal_model::authorization::{AllOf, Authorization, AuthorizationAction, PolicyRule};

use super::PolicyTrace;
use canal_compiler::text_security;
use canal_oracle::authorization::{
    OracleFacts, OracleTruth, OracleValue, all_hold, clause_holds, rule_holds,
};

pub(super) fn explain_policies(policy: &Authorization, facts: &OracleFacts) -> PolicyTrace {
    let dry = if policy.dry_run { ", dry run" } else { "" };
    let what = format!(
        "{} for {}{dry}",
        text_security::action(&policy.action),
        text_security::target(&policy.target)
    );
    let named = facts.is_foreign && policy.action == AuthorizationAction::Allow;
    let rules = policy.rules.iter().map(|rule| {
        let truth = rule_holds(rule, facts, named);
        let why = match &truth {
            OracleTruth::Yes => String::new(),
            OracleTruth::Maybe(attribute) => {
                format!("{} is not known", text_security::attribute(attribute))
            }
            OracleTruth::No if named && rule_holds(rule, facts, false) == OracleTruth::Yes => {
                "it does not name the federated client".into()
            }
            OracleTruth::No => failing(rule, facts),
        };
        (truth, why)
    });
    let rules = match &policy.broken {
        Some(why) => vec![(OracleTruth::Yes, format!("broken: {why}"))],
        None => rules.collect(),
    };
    PolicyTrace {
        policy: policy.key.clone(),
        what,
        rules,
    }
}

/// Describes, for each alternative, the first condition that does not hold.
fn failing(rule: &PolicyRule, facts: &OracleFacts) -> String {
    let fails = |all: &AllOf| {
        all.iter()
            .find(|clause| clause_holds(clause, facts) == OracleTruth::No)
            .map(|clause| {
                let own = match facts.values.get(&clause.attribute).map(Vec::as_slice) {
                    None | Some([]) => "there is none".to_owned(),
                    Some(values) => format!(
                        "it is {}",
                        values.iter().map(value).collect::<Vec<_>>().join(", ")
                    ),
                };
                format!("not so: {} ({own})", text_security::clause(clause))
            })
    };
    for alternatives in [&rule.from, &rule.to] {
        let fail: Vec<String> = alternatives.iter().filter_map(fails).collect();
        if !alternatives.is_empty() && fail.len() == alternatives.len() {
            return fail.join("; ");
        }
    }
    if all_hold(&rule.when, facts) == OracleTruth::No {
        fails(&rule.when).unwrap_or_default()
    } else {
        String::new()
    }
}

fn value(value: &OracleValue) -> String {
    match value {
        OracleValue::Text(text) => format!("{text:?}"),
        OracleValue::Address(address) => address.to_string(),
        OracleValue::Port(port) => port.to_string(),
    }
}
