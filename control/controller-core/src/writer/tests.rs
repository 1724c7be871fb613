//! Unit tests of the catalog writer: what it publishes, and what it withholds. No sockets.

use canal_controller_metrics::GaugeValues;
use canal_policy_sources::ReadContent;
use tokio::sync::oneshot;

use super::*;
use crate::config::ControllerLimits;

/// A writer without tenants, with its store and its queues.
struct WriterFixture {
    _dir: tempfile::TempDir,
    preparer: Arc<Preparer>,
    writer: CatalogWriter,
    catalogs: watch::Receiver<Arc<Catalog>>,
}

impl WriterFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), canal_store::StoreLimits::default()).unwrap());
        let (publish, catalogs) = watch::channel(Arc::new(Catalog::default()));
        let (basis, _) = watch::channel(Arc::new(Basis::default()));
        let client = canal_trust::FetchClient::new(b"").unwrap();
        let infra = canal_ca::ControllerCa::open(&dir.path().join("infra"), now_seconds())
            .unwrap()
            .of_components()
            .unwrap();
        let limits = Arc::new(TenantLimits::new(&ControllerLimits::default().capacities()));
        let certificates = limits.certificates.clone();
        let trust = TrustAuthorities::open(
            store.clone(),
            Arc::default(),
            infra,
            &Default::default(),
            &client,
            certificates,
        )
        .unwrap();
        let preparer = Arc::new(Preparer {
            store,
            metrics: Arc::default(),
            limits,
            compilers: Default::default(),
        });
        let publisher = CatalogPublisher {
            publish,
            basis,
            trust: Arc::new(trust),
        };
        let files = SourceUpdate::nothing(PolicyOrigin::Files);
        // One thread compiles: there are no files.
        let writer = CatalogWriter::start(&preparer, publisher, files, Vec::new(), 1).unwrap();
        Self {
            _dir: dir,
            preparer,
            writer,
            catalogs,
        }
    }

    /// Prepares a first state of a tenant whose files were not read yet.
    fn prepare(&self, name: &str) -> Prepared {
        let mut sources = TenantSources::new(name.parse().unwrap());
        sources.expect(PolicyOrigin::Files);
        self.preparer.sources_after(None, sources)
    }
}

#[test]
fn the_cloud_tier_and_trust_pass_all_changes_that_wait() {
    let fixture = WriterFixture::new();
    let (commands, waiting_commands) = mpsc::channel(QUEUE_MAX);
    let (tiers, waiting_tiers) = mpsc::channel(QUEUE_MAX);
    let (commits, waiting_commits) = mpsc::channel(QUEUE_MAX);
    let commit = |name: &str| {
        let (reply, answer) = oneshot::channel();
        commits
            .blocking_send(Commit {
                prepared: fixture.prepare(name),
                reply,
            })
            .unwrap();
        answer
    };
    // Two changes of alpha are prepared from the same state: the second conflicts with the first.
    let mut changes = [commit("alpha"), commit("beta"), commit("alpha")];
    let (reply, mut published) = oneshot::channel();
    tiers
        .blocking_send(TierUpdate {
            tier: TierState::default(),
            reply,
        })
        .unwrap();
    commands.blocking_send(WriterCommand::Trust).unwrap();
    // The writer returns when its queues are closed and empty, so it needs no thread here.
    drop((commands, tiers, commits));
    let WriterFixture {
        _dir,
        writer,
        catalogs,
        ..
    } = fixture;
    writer
        .run(WriterQueues {
            commands: waiting_commands,
            tiers: waiting_tiers,
            commits: waiting_commits,
        })
        .unwrap();
    let published = published.try_recv().unwrap().unwrap();
    let [alpha, beta, again] = &mut changes;
    let generation = |answer: &mut oneshot::Receiver<_>| match answer.try_recv() {
        Ok(Ok(Committed::Done(generation))) => generation,
        other => panic!("{other:?}"),
    };
    assert!(
        published < generation(alpha) && published < generation(beta),
        "the newest change was published first"
    );
    assert!(
        matches!(again.try_recv(), Ok(Ok(Committed::Moved))),
        "alpha's second change was prepared before its first was in force"
    );
    assert_eq!(catalogs.borrow().tenants.len(), 2);
}

#[test]
fn a_withheld_state_is_counted_by_its_reason() {
    let mut fixture = WriterFixture::new();
    // Any excess will do: only the reason is counted.
    let excess = |limit: &TenantAmounts| {
        *limit
            .check(&"alpha".parse().unwrap(), u64::MAX)
            .unwrap_err()
    };
    let compiled = excess(&fixture.preparer.limits.compiled);
    for (name, reason, finding) in [
        ("alpha", WithheldReason::CompiledBytes, compiled.clone()),
        ("beta", WithheldReason::Panic, compiled.clone()),
        ("gamma", WithheldReason::Clash, compiled),
    ] {
        let mut prepared = fixture.prepare(name);
        prepared
            .validated
            .as_mut()
            .unwrap()
            .objections
            .push(Objection::new(reason, finding));
        fixture.writer.commit(prepared).unwrap();
    }
    // The writer finds this excess when it takes the shares. The bytes of other tenants were
    // unknown when the state was prepared.
    let mut prepared = fixture.prepare("delta");
    prepared.validated.as_mut().unwrap().size.bytes = u64::MAX;
    fixture.writer.commit(prepared).unwrap();
    // One field beyond its share at a time: each share has its own reason.
    let mut prepared = fixture.prepare("epsilon");
    prepared.validated.as_mut().unwrap().size.resources = u64::MAX;
    fixture.writer.commit(prepared).unwrap();
    let mut prepared = fixture.prepare("zeta");
    prepared.validated.as_mut().unwrap().size.route_table_bytes = u64::MAX;
    fixture.writer.commit(prepared).unwrap();
    assert_eq!(
        fixture.writer.taken_by(&"epsilon".parse().unwrap()),
        [0; 4],
        "the permits that it had taken were returned"
    );
    let text = fixture.preparer.metrics.render(&GaugeValues::default());
    for (reason, count) in [
        ("clash", 1),
        // That of alpha, and that of delta.
        ("compiled_bytes", 2),
        ("compiled_resources", 1),
        ("panic", 1),
        ("route_table_bytes", 1),
    ] {
        let line =
            format!("canal_controller_changes_withheld_total{{reason=\"{reason}\"}} {count}\n");
        assert!(text.contains(&line), "{line} in\n{text}");
    }
}

/// Returns the sources of a tenant on the cloud tier with these Gateways in its files, each with an
/// address.
fn sources(name: &str, gateways: &[(&str, &str)]) -> TenantSources {
    let mut text = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\n\
         spec: {{vni: 1, trustDomain: {name}.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\n\
         spec: {{selector: {{app: web}}, ports: [{{name: http, port: 80}}]}}\n"
    );
    for (gateway, address) in gateways {
        text.push_str(&format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: {gateway}, namespace: shop}}\n\
             spec: {{gatewayClassName: canal, addresses: [{{value: {address}}}], listeners: [{{name: http, port: 80, protocol: HTTP}}]}}\n"
        ));
    }
    let documents = parse("mesh.yaml", &text).documents;
    let documents = documents.into_iter().map(Arc::new).collect();
    let content = ReadContent::new(PolicyOrigin::Files, documents, Vec::new());
    let mut sources = TenantSources::new(name.parse().unwrap());
    sources.take_state(SourceState::Read(Arc::new(content)));
    sources
}

#[test]
fn a_withheld_state_leaves_everything_of_the_former_in_force() {
    let mut fixture = WriterFixture::new();
    let first = fixture
        .preparer
        .sources_after(None, sources("alpha", &[("edge", "10.9.0.1")]));
    fixture.writer.commit(first).unwrap();
    let alpha: TenantName = "alpha".parse().unwrap();
    let before = fixture.catalogs.borrow().tenants[&alpha].clone();
    assert_eq!(before.ingress.addresses.len(), 1);
    // The three are the Tenant, the Service and one Gateway.
    assert!(before.withheld.is_none() && before.objects.len() == 3);
    // The second objection is to a state that follows a withheld one. The amounts differ, so that
    // its finding differs from the first.
    for (amount, gateways) in [u64::MAX, u64::MAX - 1].into_iter().zip([
        [("edge", "10.9.0.2"), ("other", "10.9.0.3")],
        [("edge", "10.9.0.4"), ("third", "10.9.0.5")],
    ]) {
        let now = fixture.writer.tenants.get(&alpha).cloned();
        let mut next = fixture
            .preparer
            .sources_after(now, sources("alpha", &gateways));
        let finding = *fixture
            .preparer
            .limits
            .compiled
            .check(&alpha, amount)
            .unwrap_err();
        let objection = Objection::new(WithheldReason::CompiledBytes, finding.clone());
        next.validated.as_mut().unwrap().objections.push(objection);
        fixture.writer.commit(next).unwrap();
        let after = fixture.catalogs.borrow().tenants[&alpha].clone();
        assert_eq!(after.objects.len(), 4, "operators read what they wrote");
        assert_eq!(after.ingress.addresses, before.ingress.addresses);
        let withheld = after.withheld.as_ref().unwrap();
        assert_eq!(withheld.reasons, [finding]);
        assert!(Arc::ptr_eq(after.objects_in_force(), &before.objects));
    }
    let now = fixture.writer.tenants.get(&alpha).cloned();
    let next = fixture
        .preparer
        .sources_after(now, sources("alpha", &[("edge", "10.9.0.6")]));
    fixture.writer.commit(next).unwrap();
    let after = fixture.catalogs.borrow().tenants[&alpha].clone();
    assert!(after.withheld.is_none() && Arc::ptr_eq(after.objects_in_force(), &after.objects));
    assert_ne!(after.ingress.addresses, before.ingress.addresses);
}

/// After a start the controller does not know whether such a state was in force before.
#[test]
fn a_state_that_exceeds_a_limit_at_the_start_keeps_its_claims() {
    check_claims_at_the_start(WithheldReason::CompileTime);
}

/// A new version of the controller may fail on what was in force.
#[test]
fn a_state_on_which_the_controller_fails_at_the_start_keeps_its_claims() {
    check_claims_at_the_start(WithheldReason::Panic);
}

fn check_claims_at_the_start(reason: WithheldReason) {
    let fixture = WriterFixture::new();
    let finding = *fixture
        .preparer
        .limits
        .compiled
        .check(&"alpha".parse().unwrap(), u64::MAX)
        .unwrap_err();
    let names = ["alpha", "beta", "gamma"];
    // All have the same VNI.
    let first = names.map(|name| sources(name, &[("edge", "10.9.0.1")]));
    let preparer = &fixture.preparer;
    let mut first = preparer.first_sources(first.into(), 2, FIRST_COMPILE_TIMEOUT);
    let order: Vec<_> = first.iter().map(|it| it.name.to_string()).collect();
    assert_eq!(order, names);
    let objection = Objection::new(reason, finding);
    first[0]
        .validated
        .as_mut()
        .unwrap()
        .objections
        .push(objection);
    let WriterFixture {
        _dir,
        mut writer,
        catalogs,
        ..
    } = fixture;
    writer.begin(first).unwrap();
    let catalog = catalogs.borrow().clone();
    let [alpha, beta, gamma] =
        names.map(|name| &catalog.tenants[&name.parse::<TenantName>().unwrap()]);
    assert!(!alpha.complete, "its data planes keep what they hold");
    assert!(alpha.claims.isolation.is_some() && alpha.of(ResourceKind::Tenant).count() == 0);
    for later in [beta, gamma] {
        assert!(later.claims.isolation.is_none(), "{:?}", later.claims);
        let reasons = &later.withheld.as_ref().unwrap().reasons;
        assert!(
            reasons.iter().any(|it| it.problem.contains("alpha")),
            "{reasons:?}"
        );
    }
}

#[test]
fn a_tenant_that_is_compiled_too_long_delays_no_start() {
    let fixture = WriterFixture::new();
    let slow = sources("alpha", &[("edge", "10.9.0.1")]);
    let claims = fixture
        .preparer
        .sources_after(None, slow.clone())
        .validated
        .unwrap()
        .compiled
        .claims;
    assert!(claims.isolation.is_some());
    // No compilation ends within no time, unless it ends before the others are given up.
    let preparer = &fixture.preparer;
    let found = std::iter::repeat_with(|| {
        let mut first = preparer.first_sources(vec![slow.clone()], 1, Duration::ZERO);
        first.remove(0).validated.unwrap()
    });
    let given_up = found
        .take(1_000)
        .find(|it| !it.objections.is_empty())
        .unwrap();
    let [objection] = given_up.objections.as_slice() else {
        panic!("{:?}", given_up.objections)
    };
    assert_eq!(objection.reason, WithheldReason::CompileTime);
    assert_eq!(given_up.compiled.claims, claims);
    assert_eq!(given_up.compiled.objects.len(), 3);
}
