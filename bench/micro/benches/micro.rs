//! Runs the operations under criterion, briefly: `cargo bench -p canal-bench-micro`.

use std::time::Duration;

use canal_bench_micro::operations;
use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    for operation in operations() {
        let mut run = (operation.make)();
        criterion.bench_function(operation.name, |bencher| bencher.iter(&mut run));
    }
    criterion.final_summary();
}
