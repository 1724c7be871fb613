//! Tests of a data plane's observations against a fake controller.

use std::sync::Mutex;

use bytes::Bytes;
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_testing::{FakeController, FakeObservation};
use canal_wire::OBSERVE_ANSWER_COST;
use canal_wire::observe::ObserveEnd;

use super::*;

/// Fixture of a process with a tap, a log and some metrics.
struct Stand {
    observation: FakeObservation,
    registry: Registry,
    logs: LogTails,
    /// Taps that have been started.
    taps: Arc<Mutex<Vec<(TapFilter, LineSender)>>>,
    _controller: FakeController,
    _drain: drain::DrainTrigger,
    _connections: watch::Sender<Option<ControllerConnection>>,
}

impl Stand {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut controller = FakeController::start().await;
        let connection = controller
            .reached_through(folder.path(), controller.address)
            .connect(0)
            .await
            .unwrap();
        let (registry, logs, taps) = (
            Registry::new(),
            LogTails::default(),
            Arc::<Mutex<Vec<_>>>::default(),
        );
        let begun = taps.clone();
        let sources = ObserveSources {
            dump: Box::new(|tenant| match tenant {
                Some(tenant) => serde_json::json!({ "of": tenant.as_str() }),
                // So large that a dump of everything takes several messages.
                None => serde_json::json!({ "all": "x".repeat(600 << 10) }),
            }),
            tap: Some(Box::new(move |filter| {
                let (sender, lines) = line_queue();
                begun.lock().unwrap().push((filter, sender));
                Some(lines)
            })),
            logs: Some(logs.clone()),
            registry: registry.clone(),
        };
        let (connections, connected) = watch::channel(Some(connection));
        let (trigger, drain) = drain::tree();
        tokio::spawn(serve(connected, sources, drain.watcher()));
        drop(drain);
        let mut observation = controller.observation().await;
        let hello = observation.receive().await.unwrap();
        let all = [
            Subject::Tap,
            Subject::Logs,
            Subject::ConfigDump,
            Subject::Metrics,
        ];
        // The first message belongs to no observation, so it has no ID.
        assert!(hello.id == 0 && hello.subjects().eq(all), "{hello:?}");
        Self {
            observation,
            registry,
            logs,
            taps,
            _controller: controller,
            _drain: trigger,
            _connections: connections,
        }
    }

    async fn order(&self, id: u64, order: Order) {
        self.observation
            .send(ObserveOrder {
                id,
                order: Some(order),
            })
            .await;
    }

    async fn begin(&self, id: u64, subject: Subject, tenant: &str) {
        let begin = ObserveBegin {
            subject: subject.into(),
            tenant: tenant.into(),
            tail: 9,
            follow: true,
            ..ObserveBegin::default()
        };
        self.order(id, Order::Begin(begin)).await;
    }

    /// Returns the next answer; `None` if none arrives for 300 ms, or 3 s in the gate.
    async fn answer(&mut self) -> Option<ObserveAnswer> {
        tokio::time::timeout(
            Duration::from_millis(300) * canal_timing::slack(),
            self.observation.receive(),
        )
        .await
        .ok()
        .flatten()
    }

    /// Returns all data of an observation and its end.
    async fn collect(&mut self, id: u64) -> (Vec<u8>, ObserveEnd) {
        let mut data = Vec::new();
        while let Some(answer) = self.answer().await {
            let cost = answer.data.len() as u64 + OBSERVE_ANSWER_COST;
            data.extend(answer.data);
            if let Some(end) = answer.end {
                return (data, end);
            }
            self.order(id, Order::Credit(cost)).await;
        }
        panic!("no end after {} bytes", data.len());
    }

    async fn tap_sender(&self) -> (TapFilter, LineSender) {
        let tapped = async {
            loop {
                if let Some(tap) = self.taps.lock().unwrap().pop() {
                    return tap;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(10)), tapped)
            .await
            .expect("a tap begins")
    }
}

#[tokio::test]
async fn a_reader_without_credit_gets_one_window_and_the_drop_count() {
    let mut stand = Stand::start().await;
    stand.begin(7, Subject::Tap, "alpha").await;
    let (filter, sender) = stand.tap_sender().await;
    assert_eq!(filter.tenant.as_deref(), Some("alpha"));
    let line = Bytes::from([vec![b'x'; 9_999], vec![b'\n']].concat());
    // 400 lines of 10 kB are more than the window and the queue hold.
    let sent = (0..400).filter(|_| sender.send(line.clone())).count();
    // Nothing reads in the loop above, and a queue of 1 MiB holds about 100 of the lines.
    assert!(sent < 200, "the queue is bounded");
    let (mut unread, mut lines, mut dropped) = (0, 0, 0);
    while let Some(answer) = stand.answer().await {
        unread += answer.data.len() as u64 + OBSERVE_ANSWER_COST;
        lines += answer.data.len() / line.len();
        dropped += answer.dropped;
    }
    assert!(
        // An answer waits until all of it fits into the credit, so the window need not be full.
        unread <= OBSERVE_WINDOW_BYTES && unread > OBSERVE_WINDOW_BYTES / 2,
        "{unread}"
    );
    // With credit the rest arrives at the limited rate, and every line is accounted for.
    let mut owed = unread;
    while lines + usize::try_from(dropped).unwrap() < 400 {
        stand
            .order(7, Order::Credit(std::mem::take(&mut owed)))
            .await;
        let answer = tokio::time::timeout(
            canal_timing::deadline(Duration::from_secs(10)),
            stand.observation.receive(),
        )
        .await
        .unwrap()
        .unwrap();
        owed += answer.data.len() as u64 + OBSERVE_ANSWER_COST;
        lines += answer.data.len() / line.len();
        dropped += answer.dropped;
        // The next line reports the lines that were dropped after the last one.
        sender.send(Bytes::from_static(b"\n"));
    }
    assert!(dropped > 0 && lines >= sent, "{lines} {dropped} {sent}");
    assert!(stand.registry.render().contains(&format!(
        "canal_observations_lines_dropped_total{{subject=\"tap\"}} {dropped}\n"
    )));
    stand.order(7, Order::End(true)).await;
    let until = tokio::time::Instant::now() + canal_timing::deadline(Duration::from_secs(10));
    while !sender.is_closed() {
        assert!(tokio::time::Instant::now() < until, "the tap has no reader");
        // An interval of polling.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn dumps_and_metrics_are_a_tenants_part_or_all() {
    let mut stand = Stand::start().await;
    let requests = stand.registry.counters(MetricFamily::new(
        "istio_requests_total",
        "R.",
        &["tenant", "code"],
    ));
    requests.shared(&["alpha", "200"]).add(3);
    requests.shared(&["beta", "500"]).add(4);
    stand
        .registry
        .counters(MetricFamily::new("canal_other_total", "O.", &["reason"]))
        .shared(&["x"])
        .inc();
    // A tenant gets the series with its own label, so none that has no label `tenant`.
    for (id, subject, tenant, has, lacks) in [
        (
            1,
            Subject::Metrics,
            "alpha",
            "istio_requests_total{tenant=\"alpha\",code=\"200\"} 3\n",
            "beta",
        ),
        (
            2,
            Subject::Metrics,
            "alpha",
            "# TYPE istio_requests_total counter\n",
            "canal_other_total",
        ),
        (
            3,
            Subject::Metrics,
            "",
            // Everything is asked for; the text that lacks is one that no series has.
            "canal_other_total{reason=\"x\"} 1\n",
            "tenant=\"gamma\"",
        ),
        (4, Subject::ConfigDump, "alpha", "\"of\": \"alpha\"", "all"),
        // The dump of everything is `Stand`'s long text.
        (5, Subject::ConfigDump, "", "\"all\": \"xxx", "of"),
    ] {
        stand.begin(id, subject, tenant).await;
        let (data, end) = stand.collect(id).await;
        let text = String::from_utf8(data).unwrap();
        assert!(
            end.reason.is_empty() && text.contains(has) && !text.contains(lacks),
            "{subject:?} {tenant}: {end:?} {text:.200}"
        );
    }
}

#[tokio::test]
async fn few_whole_answers_are_made_at_once_and_a_tenant_has_one_of_them() {
    let mut stand = Stand::start().await;
    // The first observation is not read and does not finish, because its answer is larger than the
    // window.
    stand.begin(1, Subject::ConfigDump, "").await;
    while stand.answer().await.is_some() {}
    for id in 2..10 {
        stand.begin(id, Subject::ConfigDump, "").await;
    }
    let mut busy = 0;
    while let Some(answer) = stand.answer().await {
        busy += u64::from(answer.end.is_some_and(|end| end.reason == "busy"));
    }
    assert_eq!(
        busy,
        8 - (WHOLE_ANSWERS_MAX as u64 - 1),
        "those that do not fit are refused"
    );
    assert!(
        stand
            .registry
            .render()
            .contains("canal_observations_refused_total{subject=\"config_dump\",reason=\"busy\"}")
    );
}

#[tokio::test]
async fn stored_lines_come_before_new_lines() {
    let mut stand = Stand::start().await;
    let (alpha, beta) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
    stand.logs.push(Some(&alpha), b"one\n");
    stand.logs.push(Some(&beta), b"two\n");
    stand.begin(1, Subject::Logs, "alpha").await;
    assert_eq!(stand.answer().await.unwrap().data, b"one\n");
    stand.logs.push(Some(&beta), b"three\n");
    stand.logs.push(Some(&alpha), b"four\n");
    assert_eq!(stand.answer().await.unwrap().data, b"four\n");
    assert!(stand.answer().await.is_none());
}
