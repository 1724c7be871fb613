//! Duration and number of the loads in the benches that compare loads in turns. It sends no load.

/// Duration and number of the loads.
#[derive(clap::Args)]
pub(crate) struct LoadRounds {
    /// Connections of the client, each with one request at a time
    #[arg(long, default_value_t = 64)]
    pub(crate) connections: u32,
    /// Requests per second of the loads at a stated rate (open loop); one more load runs at the
    /// maximum rate
    #[arg(long, value_delimiter = ',', default_values_t = [500, 3_000])]
    pub(crate) rates: Vec<u32>,
    /// Rounds, in each of which every load has its turn
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: u32,
    /// Seconds of each load; `cost` runs each twice, because the CPU of BPF programs and of
    /// processes is not counted at the same time
    #[arg(long, default_value_t = 3)]
    pub(crate) seconds: u32,
}
