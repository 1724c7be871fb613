//! From the IR to what each kind of data plane runs. The targets never name each other; who receives which is `scope`.

mod gateway;
mod node;

pub use gateway::gateway;
pub use node::node;
