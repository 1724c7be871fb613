//! Cases with Istio's semantics: policies, facts and the expected decision, in the language of
//! `language.rs`.

use canal_authorization::{AuthorizationDecision, ExtAuthzProgress, PolicySet};

use crate::language::{decide, facts, policies, text_of};

/// Cases: name, policies, facts, expected decision.
const CASES: &[(&str, &str, &str, &str)] = &[
    ("no policy exists", "", "", "allow"),
    (
        "an allow policy without rules allows nothing",
        "allow p",
        "principal=a/ns/b/sa/c",
        "deny",
    ),
    (
        "an allow policy with an empty rule allows all",
        "allow p {}",
        "",
        "allow",
    ),
    (
        "a deny policy without rules denies nothing",
        "deny p",
        "",
        "allow",
    ),
    (
        "a deny policy with an empty rule denies all",
        "deny p {}",
        "",
        "deny p:0",
    ),
    ("an audit policy decides nothing", "audit p {}", "", "allow"),
    (
        "a dry run of a deny decides nothing",
        "deny p dry {}",
        "",
        "allow",
    ),
    (
        "a dry run of an allow is not an allow policy",
        "allow p dry {from ns=x}",
        "ns=y",
        "allow",
    ),
    (
        "deny comes before allow",
        "allow a {} | deny d {}",
        "",
        "deny d:0",
    ),
    (
        "custom comes before deny",
        "deny d {} | custom:z c {}",
        "",
        "ask z c",
    ),
    (
        "custom comes before allow",
        "allow a | custom:z c {}",
        "",
        "ask z c",
    ),
    (
        "a custom policy that does not match calls no authorizer",
        "custom:z c {from ns=x}",
        "ns=y",
        "allow",
    ),
    (
        "a custom policy without rules calls no authorizer",
        "custom:z c",
        "",
        "allow",
    ),
    (
        "one of several allows is enough",
        "allow a {from ns=x} | allow b {from ns=y}",
        "ns=y",
        "allow",
    ),
    (
        "none of several allows",
        "allow a {from ns=x} | allow b {from ns=y}",
        "ns=z",
        "deny",
    ),
    (
        "one of several denies is enough",
        "deny a {from ns=x} | deny b {from ns=y}",
        "ns=y",
        "deny b:0",
    ),
    (
        "rules of a policy are alternatives",
        "allow a {from ns=x} {from ns=y}",
        "ns=y",
        "allow",
    ),
    (
        "the rule is named",
        "deny a {from ns=x} {from ns=y}",
        "ns=y",
        "deny a:1",
    ),
    (
        "froms are alternatives",
        "allow a {from ns=x; from ns=y}",
        "ns=y",
        "allow",
    ),
    (
        "tos are alternatives",
        "allow a {to method=GET; to method=PUT}",
        "method=PUT",
        "allow",
    ),
    (
        "clauses of a from must all hold",
        "allow a {from ns=x principal=t/ns/x/sa/p}",
        "ns=x principal=t/ns/x/sa/q",
        "deny",
    ),
    (
        "whens must all hold",
        "allow a {when header:a=1 header:b=2}",
        "header:a=1",
        "deny",
    ),
    (
        "from and to must both hold: to does not",
        "allow a {from ns=x; to method=GET}",
        "ns=x method=PUT",
        "deny",
    ),
    (
        "from and to must both hold: they do",
        "allow a {from ns=x; to method=GET}",
        "ns=x method=GET",
        "allow",
    ),
    (
        "exact principal",
        "allow a {from principal=t/ns/x/sa/p}",
        "principal=t/ns/x/sa/p",
        "allow",
    ),
    (
        "exact is no prefix",
        "allow a {from principal=t/ns/x/sa/p}",
        "principal=t/ns/x/sa/pq",
        "deny",
    ),
    (
        "principal by prefix",
        "allow a {from principal=t/ns/x/*}",
        "principal=t/ns/x/sa/p",
        "allow",
    ),
    (
        "principal by suffix",
        "allow a {from principal=*/sa/p}",
        "principal=t/ns/x/sa/p",
        "allow",
    ),
    (
        "any principal: one",
        "allow a {from principal=*}",
        "principal=t/ns/x/sa/p",
        "allow",
    ),
    (
        "any principal: none (plaintext)",
        "allow a {from principal=*}",
        "",
        "deny",
    ),
    (
        "deny peers without a principal",
        "deny a {from principal!=*}",
        "",
        "deny a:0",
    ),
    (
        "deny peers without a principal: the peer has one",
        "deny a {from principal!=*}",
        "principal=t/ns/x/sa/p",
        "allow",
    ),
    (
        "an absent value matches no negative value",
        "allow a {from ns!=x}",
        "",
        "allow",
    ),
    (
        "positive and negative values in one clause",
        "allow a {from principal=t/* principal!=t/ns/bad/sa/b}",
        "principal=t/ns/bad/sa/b",
        "deny",
    ),
    (
        "a positive value that is not a negative value",
        "allow a {from principal=t/* principal!=t/ns/bad/sa/b}",
        "principal=t/ns/x/sa/b",
        "allow",
    ),
    (
        "service account",
        "allow a {from account=x/p}",
        "account=x/p",
        "allow",
    ),
    (
        "source network",
        "allow a {from ip=10.1.0.0/16}",
        "ip=10.1.2.3",
        "allow",
    ),
    (
        "source outside the network",
        "allow a {from ip=10.1.0.0/16}",
        "ip=10.2.2.3",
        "deny",
    ),
    (
        "source address alone",
        "deny a {from ip=10.1.2.3}",
        "ip=10.1.2.3",
        "deny a:0",
    ),
    (
        "source in IPv6",
        "allow a {from ip=fd00::/8}",
        "ip=fd01::1",
        "allow",
    ),
    (
        "an IPv4 address in IPv6 is that address",
        "deny a {from ip=10.1.2.3}",
        "ip=::ffff:10.1.2.3",
        "deny a:0",
    ),
    (
        "source not in the network",
        "allow a {from ip!=10.1.0.0/16}",
        "ip=10.1.2.3",
        "deny",
    ),
    (
        "remote address",
        "deny a {from remote=192.0.2.0/24}",
        "remote=192.0.2.7 ip=10.0.0.1",
        "deny a:0",
    ),
    (
        "host without case",
        "allow a {to host=shop.example}",
        "host=SHOP.example",
        "allow",
    ),
    (
        "host without port matches with one",
        "deny a {to host=shop.example}",
        "host=shop.example:8080",
        "deny a:0",
    ),
    (
        "a host value with a port requires the port",
        "allow a {to host=shop.example:80}",
        "host=shop.example",
        "deny",
    ),
    (
        "host with port has it",
        "allow a {to host=shop.example:80}",
        "host=Shop.example:80",
        "allow",
    ),
    (
        "host by suffix, with a port on it",
        "deny a {to host=*.example}",
        "host=shop.EXAMPLE:8080",
        "deny a:0",
    ),
    (
        "host by prefix",
        "allow a {to host=shop.*}",
        "host=shop.example",
        "allow",
    ),
    (
        "host with a dot at its end",
        "deny a {to host=shop.example}",
        "host=shop.example.",
        "deny a:0",
    ),
    (
        "host with a dot and a port",
        "deny a {to host=shop.example:80}",
        "host=shop.example.:80",
        "deny a:0",
    ),
    (
        "host in brackets",
        "allow a {to host=[::1]}",
        "host=[::1]:8080",
        "allow",
    ),
    (
        "not this host",
        "allow a {to host!=admin.example}",
        "host=ADMIN.example:80",
        "deny",
    ),
    (
        "method is of one case",
        "deny a {to method=GET}",
        "method=get",
        "allow",
    ),
    (
        "not this method",
        "allow a {to method!=DELETE}",
        "method=DELETE",
        "deny",
    ),
    (
        "path exact",
        "deny a {to path=/admin}",
        "path=/admin",
        "deny a:0",
    ),
    (
        "path is of one case",
        "deny a {to path=/admin}",
        "path=/Admin",
        "allow",
    ),
    (
        "path by prefix",
        "deny a {to path=/admin*}",
        "path=/admin/x",
        "deny a:0",
    ),
    (
        "path by suffix",
        "deny a {to path=*.php}",
        "path=/x/y.php",
        "deny a:0",
    ),
    (
        "path by template",
        "allow a {to path=/u/{*}/items}",
        "path=/u/7/items",
        "allow",
    ),
    (
        "path beyond the template",
        "allow a {to path=/u/{*}/items}",
        "path=/u/7/8/items",
        "deny",
    ),
    (
        "path by template to the end",
        "allow a {to path=/u/{**}}",
        "path=/u/7/8/items",
        "allow",
    ),
    (
        "not this path",
        "allow a {to path!=/private*}",
        "path=/private/x",
        "deny",
    ),
    (
        "port",
        "deny a {to port=8080,9090}",
        "port=9090",
        "deny a:0",
    ),
    ("another port", "deny a {to port=8080}", "port=80", "allow"),
    (
        "not this port",
        "allow a {to port!=9090}",
        "port=9090",
        "deny",
    ),
    (
        "destination address",
        "deny a {when to-ip=10.9.0.0/16}",
        "to-ip=10.9.1.1",
        "deny a:0",
    ),
    (
        "server name",
        "allow a {when sni=*.example}",
        "sni=shop.example",
        "allow",
    ),
    (
        "header",
        "allow a {when header:x-role=admin}",
        "header:x-role=admin",
        "allow",
    ),
    (
        "header absent",
        "allow a {when header:x-role=admin}",
        "",
        "deny",
    ),
    (
        "header present",
        "deny a {when header:x-debug=*}",
        "header:x-debug=1",
        "deny a:0",
    ),
    (
        "header must not be there",
        "allow a {when header:x-debug!=*}",
        "header:x-debug=1",
        "deny",
    ),
    (
        "one of several header lines",
        "deny a {when header:x-role=evil}",
        "header:x-role=good,evil",
        "deny a:0",
    ),
    (
        "none of several header lines may be",
        "allow a {when header:x-role!=evil}",
        "header:x-role=good,evil",
        "deny",
    ),
    (
        "request principal",
        "allow a {from user=iss/sub}",
        "user=iss/sub",
        "allow",
    ),
    ("any request principal", "allow a {from user=*}", "", "deny"),
    (
        "deny without a token",
        "deny a {from user!=*}",
        "",
        "deny a:0",
    ),
    (
        "audience, one of several",
        "allow a {when audience=web}",
        "audience=app,web",
        "allow",
    ),
    (
        "presenter",
        "allow a {when presenter=p*}",
        "presenter=pq",
        "allow",
    ),
    (
        "claim",
        "allow a {when claim:groups=dev}",
        "claim:groups=ops,dev",
        "allow",
    ),
    (
        "nested claim",
        "allow a {when claim:realm.roles=admin}",
        "claim:realm.roles=admin",
        "allow",
    ),
    (
        "another claim",
        "allow a {when claim:realm.roles=admin}",
        "claim:realm=admin",
        "deny",
    ),
    (
        "many exact values: the last",
        "allow a {from ns=a,b,c,d,e,f,g,h,i,j}",
        "ns=j",
        "allow",
    ),
    (
        "many exact values: none",
        "allow a {from ns=a,b,c,d,e,f,g,h,i,j}",
        "ns=k",
        "deny",
    ),
    (
        "many hosts",
        "allow a {to host=a.x,b.x,c.x,d.x,e.x,f.x,g.x,h.x,i.x,j.x}",
        "host=J.x:80",
        "allow",
    ),
    ("a broken allow denies", "allow a broken", "", "deny a"),
    ("a broken deny denies", "deny a broken", "", "deny a"),
    (
        "a broken custom policy denies and calls no authorizer",
        "custom:z a broken {}",
        "",
        "deny a",
    ),
    ("a broken audit denies", "audit a broken", "", "deny a"),
    (
        "a broken dry run denies nothing",
        "deny a broken dry",
        "",
        "allow",
    ),
    (
        "unknown in a deny is undecided",
        "deny a {to path=/x}",
        "path=?",
        "undecided a request.path",
    ),
    (
        "unknown in an allow is undecided",
        "allow a {when header:h=1}",
        "header:h=?",
        "undecided a request.headers[h]",
    ),
    (
        "unknown in a custom is undecided",
        "custom:z a {to method=GET}",
        "method=?",
        "undecided a request.method",
    ),
    (
        "unknown beside what does not hold",
        "deny a {from ns=x; to path=/x}",
        "ns=y path=?",
        "allow",
    ),
    (
        "unknown beside an alternative that holds",
        "allow a {to path=/x; to port=80}",
        "path=? port=80",
        "allow",
    ),
    (
        "unknown, and another deny is sure",
        "deny a {to path=/x} | deny b {to port=80}",
        "path=? port=80",
        "deny b:0",
    ),
    (
        "unknown, and another allow is sure",
        "allow a {to path=/x} | allow b {to port=80}",
        "path=? port=80",
        "allow",
    ),
    (
        "an undecided deny, and no allow matches",
        "deny a {to path=/x} | allow b {to port=80}",
        "path=? port=81",
        "deny",
    ),
    (
        "an undecided deny with an allow",
        "deny a {to path=/x} | allow b {to port=80}",
        "path=? port=80",
        "undecided a request.path",
    ),
    (
        "unknown is not absent",
        "allow a {from principal!=*}",
        "principal=?",
        "undecided a source.principal",
    ),
    (
        "a foreign peer without policies",
        "",
        "foreign principal=o/ns/x/sa/p",
        "deny",
    ),
    (
        "a foreign peer by name",
        "allow a {from principal=o/ns/x/sa/p}",
        "foreign principal=o/ns/x/sa/p",
        "allow",
    ),
    (
        "a foreign peer by its trust domain",
        "allow a {from principal=o/*}",
        "foreign principal=o/ns/x/sa/p",
        "allow",
    ),
    (
        "a foreign peer by any principal",
        "allow a {from principal=*}",
        "foreign principal=o/ns/x/sa/p",
        "deny",
    ),
    (
        "a foreign peer by suffix",
        "allow a {from principal=*/sa/p}",
        "foreign principal=o/ns/x/sa/p",
        "deny",
    ),
    (
        "a foreign peer by namespace",
        "allow a {from ns=x}",
        "foreign principal=o/ns/x/sa/p ns=x",
        "deny",
    ),
    (
        "a foreign peer by an empty rule",
        "allow a {}",
        "foreign principal=o/ns/x/sa/p",
        "deny",
    ),
    (
        "a foreign peer by name in when",
        "allow a {when principal=o/ns/x/sa/p}",
        "foreign principal=o/ns/x/sa/p",
        "allow",
    ),
    (
        "a federated peer, by the other `from`",
        "allow a {from ns=x; from principal=o/*}",
        "foreign principal=o/ns/x/sa/p",
        "allow",
    ),
    (
        "a foreign peer that is denied",
        "allow a {from principal=o/*} | deny d {from ns=x}",
        "foreign principal=o/ns/x/sa/p ns=x",
        "deny d:0",
    ),
    (
        "a foreign peer is custom's too",
        "custom:z c {}",
        "foreign principal=o/ns/x/sa/p",
        "ask z c",
    ),
];

#[test]
fn policies_agree_with_istio() {
    for (name, policies, facts, want) in CASES {
        assert_eq!(decide(policies, facts), *want, "{name}");
    }
}

#[test]
fn authorizers_are_called_one_after_the_other() {
    let set = PolicySet::new(&policies(
        "custom:y a {} | custom:z b {} | custom:y c {} | deny d {to path=/x}",
    ));
    let (given, other) = (facts("path=/y"), facts("path=/x"));
    let AuthorizationDecision::CallAuthorizer { then, .. } = set.decide(&given) else {
        panic!("no authorizer is called")
    };
    assert_eq!(text_of(set.decide(&given)), "ask y a");
    let AuthorizationDecision::CallAuthorizer { then: last, .. } = set.decide_after(&given, then)
    else {
        panic!("only one authorizer is called")
    };
    assert_eq!(text_of(set.decide_after(&given, then)), "ask z b");
    assert_eq!(
        (
            text_of(set.decide_after(&given, last)),
            text_of(set.decide_after(&other, last))
        ),
        ("allow".into(), "deny d:0".into())
    );
    assert_eq!(
        text_of(set.decide_after(&given, ExtAuthzProgress::ALL)),
        "allow"
    );
    assert_eq!(set.authorizers().count(), 2);
    let unseen = PolicySet::new(&policies("custom:y a {to path=/x}"));
    assert_eq!(
        text_of(unseen.decide_after(&facts("path=?"), ExtAuthzProgress::ALL)),
        "allow",
        "an earlier hop has seen the path"
    );
}

#[test]
fn audits_and_dry_runs_are_reported_and_not_enforced() {
    let text = "audit a {to path=/x} | deny d dry {to path=/x} | allow w dry {to path=/x} | custom:z c dry {} | deny b dry broken | audit n {to path=/y}";
    let set = PolicySet::new(&policies(text));
    let hits = |given: &str| {
        let mut hits = Vec::new();
        set.observe(&facts(given), &mut |hit| {
            hits.push(format!("{} {}", hit.policy.name, hit.kind.name()))
        });
        hits
    };
    assert!(set.observes() && !set.is_empty() && set.needs_path() && !set.needs_http());
    assert!(set.decide(&facts("path=/x")).is_allow());
    assert_eq!(
        hits("path=/x"),
        [
            "a audit",
            "d dry_run_deny",
            "w dry_run_allow",
            "c dry_run_custom",
            "b dry_run_deny"
        ]
    );
    assert_eq!(hits("path=?"), ["c dry_run_custom", "b dry_run_deny"]);
}

#[test]
fn policy_sets_list_their_attributes() {
    for (text, path, beyond) in [
        ("", false, false),
        ("deny a {from ns=x; to port=80}", false, false),
        ("deny a {to method=GET}", false, true),
        ("allow a {to path=/x}", true, true),
        ("allow a {when header:x!=1}", false, true),
        ("custom:z a {}", true, true),
        ("custom:z a dry {}", false, false),
        ("audit a {to path=/x}", true, false),
        ("deny a dry {to path=/x}", false, false),
    ] {
        let set = PolicySet::new(&policies(text));
        assert_eq!(
            (set.needs_path(), set.needs_http()),
            (path, beyond),
            "{text}"
        );
        assert_eq!(set.is_empty(), text.is_empty());
    }
}
