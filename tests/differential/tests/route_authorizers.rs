//! External authorization of rules over HTTP, in the gateway, compared with the oracle: the check
//! about a request, and the meaning of the answer.

use canal_gateway_config::RequestMutations;
use canal_gateway_http::head::FullRequest;
use canal_gateway_http::route_authorizer::{HttpAuthzCheck, HttpAuthzResponse};
use canal_oracle::filters::ForwardedRequest;
use canal_oracle::route_authorizers::{OracleCheckResult, check, decision};
use canal_router::RoutableRequest;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

const NAMES: [&str; 8] = [
    "authorization",
    "cookie",
    "host",
    "content-length",
    "content-type",
    "x-user",
    "date",
    "connection",
];

/// A request as the client sent it.
#[derive(Debug)]
struct CheckedRequest(ForwardedRequest);

impl RoutableRequest for CheckedRequest {
    fn host(&self) -> &[u8] {
        self.0.host.as_bytes()
    }
    fn method(&self) -> &[u8] {
        b"GET"
    }
    fn path(&self) -> &[u8] {
        let (path, _) = self
            .0
            .target
            .split_once('?')
            .unwrap_or((&self.0.target, ""));
        path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        let (_, query) = self.0.target.split_once('?')?;
        Some(query.as_bytes())
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let lines = self.0.headers.iter();
        let lines = lines.filter(|(sent, _)| sent.eq_ignore_ascii_case(name));
        lines.for_each(|(_, value)| visit(value.as_bytes()));
    }
}

impl FullRequest for CheckedRequest {
    fn each_header(&self, visit: &mut dyn FnMut(&[u8], &[u8])) {
        let lines = self.0.headers.iter();
        lines.for_each(|(name, value)| visit(name.as_bytes(), value.as_bytes()));
    }
}

fn lines() -> impl Strategy<Value = Vec<(String, String)>> {
    let name = select(NAMES.to_vec()).prop_map(str::to_owned);
    vec((name, "[a-z]{0,2}"), 0..6)
}

fn choose_names() -> impl Strategy<Value = Vec<String>> {
    vec(select(NAMES.to_vec()).prop_map(str::to_owned), 0..3)
}

fn texts(lines: Vec<(String, Vec<u8>)>) -> Vec<(String, String)> {
    let lines = lines.into_iter();
    lines
        .map(|(name, value)| (name, String::from_utf8(value).expect("a text")))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_gateway_sends_the_check_of_the_oracle(
        target in "\\*|/(a|b/)?(\\?[a-z/]{0,3})?",
        prefix in "|/|/auth/?|/a/b",
        headers in lines(),
        listed in choose_names(),
    ) {
        let mut headers = headers;
        for (name, _) in headers.iter_mut().step_by(2) {
            *name = name.to_ascii_uppercase();
        }
        let request = ForwardedRequest { host: "web:80".to_owned(), target, headers };
        let expected = check(&prefix, &listed, &request);
        let sent = CheckedRequest(request);
        let checked = HttpAuthzCheck::new(
            (&sent, &b"web:80"[..], "10.0.0.1"),
            &RequestMutations::default(),
            (prefix.as_str(), listed.as_slice()),
            Default::default(),
        );
        let headers = checked.headers.into_iter();
        let headers = headers.map(|(name, value)| (String::from_utf8(name).unwrap(), value));
        let actual = ForwardedRequest {
            host: String::from_utf8(checked.authority).unwrap(),
            target: String::from_utf8(checked.target).unwrap(),
            headers: texts(headers.collect()),
        };
        prop_assert_eq!(actual, expected);
    }

    #[test]
    fn the_gateway_reads_answers_as_the_oracle_does(
        status in prop_oneof![Just(200), 101..=599u16],
        headers in lines(),
        listed in choose_names(),
    ) {
        let expected = decision(&listed, status, &headers);
        let answer = HttpAuthzResponse {
            status,
            headers: headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
            body: Default::default(),
        };
        let actual = match answer.read(&listed) {
            Ok(Ok(passed)) => OracleCheckResult::Allow(texts(passed)),
            Ok(Err(denial)) => OracleCheckResult::Deny(denial.status, texts(denial.headers)),
            Err(_) => OracleCheckResult::Undecided,
        };
        prop_assert_eq!(actual, expected);
    }
}
