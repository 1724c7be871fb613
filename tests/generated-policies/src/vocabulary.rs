//! The words of generated policies and requests. There are few of each, so that policies and
//! requests meet.

use proptest::prelude::*;
use proptest::sample::select;

pub(crate) const PATHS: [&str; 10] = [
    "/", "/a", "/a/", "/a/b", "/ab", "/a/b/c", "/b", "/a/bc", "//a", "/a/b/",
];
pub(crate) const HOSTS: [&str; 5] = [
    "web",
    "a.example.com",
    "b.a.example.com",
    "*.example.com",
    "*.a.example.com",
];
pub(crate) const NAMES: [&str; 3] = ["x-a", "x-b", "X-C"];
pub(crate) const VALUES: [&str; 5] = ["1", "2", "12", "", "1,2"];

/// Selects one of the words.
pub(crate) fn words(words: &'static [&'static str]) -> impl Strategy<Value = String> + Clone {
    select(words).prop_map(str::to_owned)
}
