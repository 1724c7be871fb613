//! Parses and explains the arrivals of `#!>` directives: those of `#>` with conditions of the client.
//! `from=ADDRESS` is the client's address, `jwt=JSON` are a token's claims, and the word
//! `certificate` is a certificate of the listener's authorities.

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_explain::{ArrivalDescription, explain_arrival};

use super::{ingress, parse_headers};

pub(crate) fn answer(ir: &Ir, arrival: &str) -> String {
    let explained = explain_arrival(ir, &read(ir, arrival));
    let explained = explained.map_or_else(|| "no such Gateway".to_owned(), |it| it.to_string());
    let lines: Vec<String> = explained.lines().map(|line| format!("  {line}")).collect();
    format!("{arrival}\n{}\n", lines.join("\n"))
}

fn read(ir: &Ir, arrival: &str) -> ArrivalDescription {
    let mut words: Vec<&str> = arrival.split_whitespace().collect();
    let mut from = None;
    let mut claims = None;
    let mut has_certificate = false;
    // These words may stand anywhere; all others have a fixed position.
    words.retain(|word| {
        if let Some(address) = word.strip_prefix("from=") {
            from = Some(address.parse().unwrap());
        } else if let Some(text) = word.strip_prefix("jwt=") {
            claims = Some(serde_json::from_str(text).unwrap());
        } else if *word == "certificate" {
            has_certificate = true;
        } else {
            return true;
        }
        false
    });
    let [method, gateway, rest @ ..] = words.as_slice() else {
        panic!("{arrival:?} is not a request")
    };
    let (gateway, name) = match gateway.split_once(',') {
        None => (*gateway, None),
        Some((gateway, name)) => (gateway, Some(name)),
    };
    let (gateway, port) = gateway.rsplit_once(':').unwrap();
    let gateway = ingress::gateway_named(ir, gateway).expect("a Gateway");
    let port = port.parse().unwrap();
    let request = match rest {
        [host, target, headers @ ..] => Some(OracleRequest {
            service: gateway.service.clone(),
            port,
            host: (*host).to_owned(),
            method: (*method).to_owned(),
            target: (*target).to_owned(),
            headers: parse_headers(headers),
            client: OracleClient::default(),
        }),
        // Without a host and a target, only the connection is explained.
        _ => None,
    };
    ArrivalDescription {
        gateway: gateway.service.clone(),
        port,
        address: from,
        is_tls: name.is_some(),
        // `-` stands for a TLS client that sends no server name.
        server_name: name.filter(|name| *name != "-").map(str::to_owned),
        has_certificate,
        request,
        claims,
    }
}
