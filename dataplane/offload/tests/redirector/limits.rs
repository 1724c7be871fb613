//! Tests early limits of the redirector: they are exact, charged once, divided among replicas, and
//! shared by processors.

use super::*;

/// Repeats `f` until it takes less than a second, because the slowest limit gives one token per
/// second.
fn within_a_second<T>(mut f: impl FnMut() -> T) -> T {
    let started = Instant::now();
    loop {
        let began = Instant::now();
        let done = f();
        if began.elapsed() < Duration::from_millis(900) {
            return done;
        }
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(20)),
            "the interval is never less than a second"
        );
    }
}

fn service(id: u32) -> ThrottleKey {
    ThrottleKey {
        scope: THROTTLE_SERVICE,
        id,
    }
}

fn sessions(burst: u64) -> ThrottleLimits {
    ThrottleLimits {
        sessions: Some(ThrottleLimit { rate: 1, burst }),
        ..ThrottleLimits::default()
    }
}

fn packets(burst: u64) -> ThrottleLimits {
    ThrottleLimits {
        packets: Some(ThrottleLimit { rate: 1, burst }),
        ..ThrottleLimits::default()
    }
}

/// Checks that a limit gets new tokens at its rate, and never more than its burst.
fn check_refill(s: &RedirectorFixture, syn: &[u8]) {
    let r = &s.redirector;
    r.set_throttle(
        &service(1),
        &ThrottleLimits {
            sessions: Some(ThrottleLimit {
                rate: 200,
                burst: 1,
            }),
            ..ThrottleLimits::default()
        },
    )
    .unwrap();
    s.run(syn);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(s.run(syn).moved, ["new"], "refilled");
    assert_eq!(
        r.throttles().unwrap()[&service(1)].sessions.tokens / 1_000_000_000,
        0,
        "never more than the burst"
    );
}

/// Checks the limits of a service and of its tenant together, with frames of which each limit
/// refuses one.
fn check_both_limits(s: &RedirectorFixture, tenant: ThrottleKey, frames: [&Vec<u8>; 5]) {
    let r = &s.redirector;
    let both = [(service(1), sessions(1)), (tenant, sessions(2))];
    let set_both = || {
        both.iter()
            .for_each(|(key, limits)| r.set_throttle(key, limits).unwrap())
    };
    let moved = within_a_second(|| {
        both.iter()
            .for_each(|(key, _)| r.remove_throttle(key).unwrap());
        set_both();
        let before = r.throttles().unwrap();
        set_both();
        assert_eq!(r.throttles().unwrap(), before, "they keep what they have");
        frames.map(|frame| s.run(frame).moved[0])
    });
    // Packets are not limited here. Another service has its own limit, and a packet that a
    // service's limit refuses costs its tenant nothing.
    assert_eq!(
        moved,
        [
            "new",
            "throttled_service_sessions",
            "unowned",
            "forwarded_new",
            "throttled_tenant_sessions"
        ]
    );
    both.iter()
        .for_each(|(key, _)| r.remove_throttle(key).unwrap());
    assert!(r.throttles().unwrap().is_empty());
}

#[test]
fn early_limits_are_exact() {
    let s = scene();
    let r = &s.redirector;
    let tenant = ThrottleKey {
        scope: THROTTLE_TENANT,
        id: TENANT,
    };
    let syn = from_edge(0, &tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b""));
    // Hop 8 is the last, so the segment is not forwarded.
    let data = from_edge(8, &tcp("10.1.1.2:4711", "240.0.0.1:80", ACK, b""));
    let forwarded = from_edge(0, &tcp("10.1.1.2:4711", "240.0.0.2:80", SYN, b""));
    for (case, key, limits, frame, pass, counter) in [
        (
            "a service's sessions",
            service(1),
            sessions(5),
            &syn,
            5,
            "throttled_service_sessions",
        ),
        (
            "a service's packets",
            service(1),
            packets(7),
            &data,
            7,
            "throttled_service_packets",
        ),
        (
            "SYNs are packets",
            service(1),
            packets(3),
            &syn,
            3,
            "throttled_service_packets",
        ),
        (
            "what is passed on counts too",
            service(2),
            sessions(2),
            &forwarded,
            2,
            "throttled_service_sessions",
        ),
        (
            "a tenant's sessions",
            tenant,
            sessions(4),
            &syn,
            4,
            "throttled_tenant_sessions",
        ),
        (
            "a tenant's packets",
            tenant,
            packets(1),
            &data,
            1,
            "throttled_tenant_packets",
        ),
    ] {
        let ran = within_a_second(|| {
            r.remove_throttle(&key).unwrap();
            r.set_throttle(&key, &limits).unwrap();
            // The last two are beyond the limit.
            (0..pass + 2).map(|_| s.run(frame)).collect::<Vec<Ran>>()
        });
        let refused = ran
            .iter()
            .filter(|x| x.verdict == DROPPED)
            .collect::<Vec<_>>();
        assert!(ran[..pass].iter().all(|x| x.verdict != DROPPED), "{case}");
        assert_eq!(refused.len(), 2, "{case}");
        assert!(refused.iter().all(|x| x.moved == [counter]), "{case}");
        let held = r.throttles().unwrap()[&key];
        assert_eq!(held.sessions.refused + held.packets.refused, 2, "{case}");
        r.remove_throttle(&key).unwrap();
        assert_ne!(s.run(frame).verdict, DROPPED, "{case}: lifted");
    }
    check_both_limits(&s, tenant, [&syn, &syn, &data, &forwarded, &forwarded]);
    check_refill(&s, &syn);
}

/// A packet from another replica was charged there. A packet from an edge is charged here,
/// regardless of its hop.
#[test]
fn a_packet_is_charged_only_where_it_enters_the_tier() {
    let s = scene();
    let r = &s.redirector;
    let key = ThrottleKey {
        scope: THROTTLE_SERVICE,
        id: 1,
    };
    let packet = tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b"");
    let forwarded = |hop: u8| {
        OuterHeaders {
            hop,
            stamp: 1,
            ..OuterHeaders::new("250.1.0.3", SELF, TIER_VNI)
        }
        .frame(&packet)
    };
    let limit = Some(ThrottleLimit { rate: 1, burst: 2 });
    for limits in [
        ThrottleLimits {
            sessions: limit,
            ..ThrottleLimits::default()
        },
        ThrottleLimits {
            packets: limit,
            ..ThrottleLimits::default()
        },
    ] {
        let ran = within_a_second(|| {
            // Unchanged limits would keep the few tokens of an earlier attempt.
            r.remove_throttle(&key).unwrap();
            r.set_throttle(&key, &limits).unwrap();
            // Eight, and below four, are more than the burst of two.
            let passed_on: Vec<u32> = (0..8).map(|_| s.run(&forwarded(1)).verdict).collect();
            (
                passed_on,
                (0..4)
                    .map(|_| s.run(&from_edge(1, &packet)).verdict)
                    .collect::<Vec<u32>>(),
            )
        });
        assert!(
            ran.0.iter().all(|verdict| *verdict != DROPPED),
            "{limits:?}: {ran:?}"
        );
        assert_eq!(
            ran.1.iter().filter(|verdict| **verdict == DROPPED).count(),
            2,
            "{limits:?}: {ran:?}"
        );
    }
}

/// The parts of all replicas add up to the limit: the same number of packets passes at one, two,
/// three or more replicas.
#[test]
fn parts_of_a_limit_sum_up_to_it_whatever_the_number_of_replicas() {
    let s = scene();
    let r = &s.redirector;
    let key = ThrottleKey {
        scope: THROTTLE_TENANT,
        id: TENANT,
    };
    let syn = from_edge(0, &tcp("10.1.1.2:4711", "240.0.0.1:80", SYN, b""));
    // In 128ths of a limit with a burst of 96, so that parts round down; 0 is the whole limit.
    for parts in [
        vec![0],
        vec![128],
        vec![64, 64],
        vec![43, 43, 42],
        vec![120, 8],
        vec![16; 8],
    ] {
        let passed: usize = parts
            .iter()
            .map(|part| {
                within_a_second(|| {
                    r.remove_throttle(&key).unwrap();
                    let limits = ThrottleLimits {
                        sessions: Some(ThrottleLimit { rate: 1, burst: 96 }),
                        part: *part,
                        ..ThrottleLimits::default()
                    };
                    r.set_throttle(&key, &limits).unwrap();
                    // More than the whole burst.
                    (0..110).filter(|_| s.run(&syn).verdict != DROPPED).count()
                })
            })
            .sum();
        // Each part may round down by less than one packet, so the sum lacks less than their number.
        assert!(
            (97 - parts.len()..=96).contains(&passed),
            "{parts:?}: {passed} of 96"
        );
    }
    // A part that is smaller than one token of the burst still lets one packet pass.
    let few = within_a_second(|| {
        r.remove_throttle(&key).unwrap();
        r.set_throttle(
            &key,
            &ThrottleLimits {
                sessions: Some(ThrottleLimit { rate: 1, burst: 1 }),
                part: 1,
                ..ThrottleLimits::default()
            },
        )
        .unwrap();
        // More than the burst of a single token.
        (0..5).filter(|_| s.run(&syn).verdict != DROPPED).count()
    });
    assert_eq!(few, 1);
    // The rate is divided too: a quarter of 400 per second is 100 per second. The burst covers
    // pauses of this test.
    r.remove_throttle(&key).unwrap();
    r.set_throttle(
        &key,
        &ThrottleLimits {
            sessions: Some(ThrottleLimit {
                rate: 400,
                burst: 80,
            }),
            part: 32,
            ..ThrottleLimits::default()
        },
    )
    .unwrap();
    // Far more than the burst and what the rate adds meanwhile.
    let used_up = (0..100_000).any(|_| s.run(&syn).verdict == DROPPED);
    assert!(used_up, "the burst has no end");
    let (begun, mut passed) = (std::time::Instant::now(), 0u32);
    // A second, because the rate is per second.
    while begun.elapsed() < Duration::from_millis(1000) {
        passed += u32::from(s.run(&syn).verdict != DROPPED);
    }
    // Of the 2, one is for the fraction that the conversion drops, one for a token begun before.
    let most = (begun.elapsed().as_secs_f64() * 100.0) as u32 + 2;
    assert!(passed <= most, "{passed} of {most}");
    canal_timing::timed!(
        // A tenth less than the rate, for a machine that does not run the loop all the time.
        passed >= 90,
        "a quarter of a limit of 400 per second lets 90 pass in a second"
    );
}

#[test]
fn each_datagram_counts_as_a_session() {
    let s = scene();
    let r = &s.redirector;
    let key = ThrottleKey {
        scope: THROTTLE_SERVICE,
        id: 1,
    };
    let question = from_edge(0, &udp("10.1.1.2:4711", "240.0.0.1:53", b"question"));
    let ran = within_a_second(|| {
        r.remove_throttle(&key).unwrap();
        r.set_throttle(
            &key,
            &ThrottleLimits {
                sessions: Some(ThrottleLimit { rate: 1, burst: 3 }),
                ..ThrottleLimits::default()
            },
        )
        .unwrap();
        (0..5).map(|_| s.run(&question)).collect::<Vec<Ran>>()
    });
    let refused: Vec<_> = ran.iter().filter(|x| x.verdict == DROPPED).collect();
    assert_eq!(refused.len(), 2);
    assert!(
        refused
            .iter()
            .all(|x| x.moved == ["throttled_service_sessions"])
    );
}

#[test]
fn two_processors_share_one_limit() {
    let pins = LabPins::new();
    let pair = [0; 2].map(|_| RedirectorPrograms::load(&options(Some(&pins))).unwrap());
    assert_eq!(
        pair.each_ref().map(RedirectorPrograms::is_adopted),
        [false, true],
        "the second has the maps of the first"
    );
    pair[0]
        .hosts()
        .put(&address_be(EDGE.parse().unwrap()), &0)
        .unwrap();
    pair[1]
        .tables()
        .put(
            &4,
            &Table {
                vni: TENANT,
                version: 1,
                chain: [[1, 0, 0, 0, 0, 0, 0, 0]; BUCKETS],
            },
        )
        .unwrap();
    let key = ThrottleKey {
        scope: THROTTLE_TENANT,
        id: TENANT,
    };
    let frame = from_edge(0, &tcp("10.1.1.2:4711", "240.0.0.4:80", ACK, b""));
    let throttled = |r: &RedirectorPrograms| counts(r)["throttled_tenant_packets"];
    let mut pair = Some(pair);
    within_a_second(|| {
        let [a, b] = pair.take().unwrap();
        a.remove_throttle(&key).unwrap();
        a.set_throttle(
            &key,
            &ThrottleLimits {
                packets: Some(ThrottleLimit {
                    rate: 1,
                    burst: 250,
                }),
                ..ThrottleLimits::default()
            },
        )
        .unwrap();
        let before = throttled(&a);
        let run = |r: RedirectorPrograms| {
            let frame = frame.clone();
            std::thread::spawn(move || {
                // 800 together, of which the burst admits 250.
                (0..400).for_each(|_| drop(r.test_run(&frame).unwrap()));
                r
            })
        };
        let (a, b) = (run(a), run(b));
        let [a, b] = [a.join().unwrap(), b.join().unwrap()];
        let refused = throttled(&a) - before;
        assert_eq!(a.throttles().unwrap()[&key].packets.refused, refused);
        pair = Some([a, b]);
        // The rate of one per second may admit one or two more.
        assert!(
            (548..=550).contains(&refused),
            "{refused} of 800 refused, 250 may pass"
        );
    });
    drop(pair);
    // The programs are attached nowhere, so any namespace will do.
    redirector::remove(Some(&LabNetns::new().path()), "pod0", Some(pins.path())).unwrap();
    assert!(!pins.path().exists(), "nothing stays");
}
