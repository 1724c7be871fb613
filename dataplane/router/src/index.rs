//! The path index of one service: a segment trie flattened into one open-addressed table keyed by (node, segment). What ends at a
//! node is kept in the entry that leads to it, so that a step down a path costs one cache line. It knows nothing of conditions:
//! candidates are ranks, and smaller ranks win.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

/// A place in the trie; below [`INSIDE`].
pub(crate) type Node = u32;
/// The place of a match in the order of precedence; below [`SEVERAL`].
pub(crate) type Rank = u32;

/// The string prefixes that end inside a node's next segment hang at the node with this bit.
const INSIDE: u32 = 1 << 31;
/// The parents of hosts, and of nothing: no node has these numbers.
const EXACT_HOST: u32 = u32::MAX;
const SUFFIX_HOST: u32 = u32::MAX - 1;
const VACANT: u32 = u32::MAX - 2;

/// With this bit a slot is a place in the lists, else it is a rank by itself.
const SEVERAL: u32 = 1 << 31;
const NOTHING: u32 = u32::MAX;
/// More ranks than this cannot be kept.
pub(crate) const RANKS_MAX: usize = SEVERAL as usize;

/// Segments up to this length lie in the table, longer ones apart.
const INLINE_BYTES: usize = 24;
/// Entries per five places: linear probing stays short, and 48-byte entries cost 80 bytes.
const LOAD: (usize, usize) = (3, 5);

/// Which of a node's candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum List {
    /// The path ends here.
    Exact,
    /// The path ends or goes on with `/` here; for a node inside a segment: goes on anyhow.
    Prefix,
}

/// What ends at a node: two slots of candidates, and the lengths of the string prefixes inside its next segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ends {
    exact: u32,
    prefix: u32,
    lengths: u32,
}

const NO_ENDS: Ends = Ends { exact: NOTHING, prefix: NOTHING, lengths: NOTHING };

/// 48 bytes. The text is stored so that equal hashes cannot be taken for equal segments.
#[derive(Debug, Clone, Copy)]
struct Entry {
    parent: u32,
    child: Node,
    len: u32,
    ends: Ends,
    /// The text, or the place of a long one in four bytes.
    text: [u8; INLINE_BYTES],
}

const VACANT_ENTRY: Entry = Entry { parent: VACANT, child: 0, len: 0, ends: NO_ENDS, text: [0; INLINE_BYTES] };
const _: () = assert!(size_of::<Entry>() == 48);

/// The finished index.
#[derive(Debug)]
pub(crate) struct Index {
    hash: RandomState,
    /// Never full.
    entries: Box<[Entry]>,
    long_texts: Box<[u8]>,
    /// A count, then so many ranks or lengths.
    lists: Box<[u32]>,
}

/// A node that was reached, and what ends there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reached<'a> {
    pub(crate) node: Node,
    pub(crate) ends: &'a Ends,
}

#[inline]
fn hash_of(hash: &RandomState, parent: u32, text: &[u8]) -> u64 {
    let mut hasher = hash.build_hasher();
    hasher.write_u32(parent);
    hasher.write(text);
    hasher.finish()
}

/// Where a hash's probing starts: the high half of the product spreads evenly over any number of places.
#[inline]
fn place_of(hash: u64, places: usize) -> usize {
    ((u128::from(hash) * places as u128) >> 64) as usize
}

impl Index {
    #[inline]
    fn entry(&self, parent: u32, text: &[u8]) -> Option<&Entry> {
        let mut place = place_of(hash_of(&self.hash, parent, text), self.entries.len());
        loop {
            let entry = &self.entries[place];
            if entry.parent == parent && self.text_of(entry) == text {
                return Some(entry);
            }
            if entry.parent == VACANT {
                return None;
            }
            place = if place + 1 == self.entries.len() { 0 } else { place + 1 };
        }
    }

    #[inline]
    fn text_of<'a>(&'a self, entry: &'a Entry) -> &'a [u8] {
        let len = entry.len as usize;
        match entry.text.get(..len) {
            Some(text) => text,
            None => {
                let [a, b, c, d, ..] = entry.text;
                let start = u32::from_ne_bytes([a, b, c, d]) as usize;
                &self.long_texts[start..start + len]
            }
        }
    }

    /// The node after a whole segment.
    #[inline]
    pub(crate) fn child(&self, node: Node, segment: &[u8]) -> Option<Reached<'_>> {
        self.entry(node, segment).map(|entry| Reached { node: entry.child, ends: &entry.ends })
    }

    /// What was kept at an exact host.
    pub(crate) fn exact_host(&self, host: &[u8]) -> Option<u32> {
        self.entry(EXACT_HOST, host).map(|entry| entry.child)
    }

    /// What was kept at a suffix; it begins with a dot.
    pub(crate) fn suffix_host(&self, suffix: &[u8]) -> Option<u32> {
        self.entry(SUFFIX_HOST, suffix).map(|entry| entry.child)
    }

    /// Candidates in order of rank.
    #[inline]
    pub(crate) fn candidates<'a>(&'a self, ends: &'a Ends, list: List) -> &'a [Rank] {
        let slot = match list {
            List::Exact => &ends.exact,
            List::Prefix => &ends.prefix,
        };
        match *slot {
            NOTHING => &[],
            single if single & SEVERAL == 0 => std::slice::from_ref(slot),
            several => self.list(several & !SEVERAL),
        }
    }

    fn list(&self, at: u32) -> &[u32] {
        let at = at as usize;
        &self.lists[at + 1..at + 1 + self.lists[at] as usize]
    }

    /// The string prefixes that end inside the segment at the start of `rest`, longest first.
    pub(crate) fn inside<'a>(&'a self, from: Reached<'a>, rest: &'a [u8]) -> impl Iterator<Item = &'a Ends> {
        let lengths = if from.ends.lengths == NOTHING { &[] } else { self.list(from.ends.lengths) };
        lengths
            .iter()
            .filter_map(move |&length| rest.get(..length as usize))
            .filter_map(move |text| self.entry(from.node | INSIDE, text))
            .map(|entry| &entry.ends)
    }

    /// Bytes on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.long_texts.len() + size_of_val(&*self.lists)
    }
}

/// An edge in the making.
#[derive(Debug, Clone, Copy)]
struct Edge {
    parent: u32,
    child: Node,
    text: u32,
    len: u32,
}

/// An index in the making.
pub(crate) struct IndexBuilder {
    hash: RandomState,
    edges: HashTable<Edge>,
    texts: Vec<u8>,
    node_count: u32,
    candidates: Vec<(Node, List, Rank)>,
    lengths: Vec<(Node, u32)>,
}

impl IndexBuilder {
    pub(crate) fn new() -> Self {
        IndexBuilder {
            hash: RandomState::default(),
            edges: HashTable::new(),
            texts: Vec::new(),
            node_count: 0,
            candidates: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// A new root.
    pub(crate) fn root(&mut self) -> Node {
        self.node_count += 1;
        self.node_count - 1
    }

    /// The child at `text`, made by `make` if it is not there.
    fn edge(&mut self, parent: u32, text: &[u8], make: impl FnOnce(&mut Self) -> u32) -> u32 {
        let hash = hash_of(&self.hash, parent, text);
        let same = |edge: &Edge| edge.parent == parent && edge_text(&self.texts, edge) == text;
        if let Some(edge) = self.edges.find(hash, same) {
            return edge.child;
        }
        let edge = Edge { parent, child: make(self), text: self.texts.len() as u32, len: text.len() as u32 };
        self.texts.extend_from_slice(text);
        let (seed, texts) = (&self.hash, &self.texts);
        self.edges.insert_unique(hash, edge, |edge| hash_of(seed, edge.parent, edge_text(texts, edge)));
        edge.child
    }

    /// The number kept at an exact host, `fresh` if the host is new.
    pub(crate) fn exact_host(&mut self, host: &[u8], fresh: u32) -> u32 {
        self.edge(EXACT_HOST, host, |_| fresh)
    }

    /// The number kept at a suffix, `fresh` if the suffix is new.
    pub(crate) fn suffix_host(&mut self, suffix: &[u8], fresh: u32) -> u32 {
        self.edge(SUFFIX_HOST, suffix, |_| fresh)
    }

    /// The node after all segments of `path`, which begins with `/`.
    fn descend(&mut self, root: Node, path: &str) -> Node {
        path.as_bytes()[1..].split(|&b| b == b'/').fold(root, |node, segment| self.edge(node, segment, IndexBuilder::root))
    }

    /// The path is exactly this.
    pub(crate) fn add_exact(&mut self, root: Node, path: &str, rank: Rank) {
        let node = self.descend(root, path);
        self.candidates.push((node, List::Exact, rank));
    }

    /// The path begins with these elements. A trailing `/` is ignored, so `/` is every path.
    pub(crate) fn add_element_prefix(&mut self, root: Node, path: &str, rank: Rank) {
        let path = path.strip_suffix('/').unwrap_or(path);
        let node = if path.is_empty() { root } else { self.descend(root, path) };
        self.candidates.push((node, List::Prefix, rank));
    }

    /// The path begins with this text.
    pub(crate) fn add_string_prefix(&mut self, root: Node, prefix: &str, rank: Rank) {
        let cut = prefix.rfind('/').unwrap_or_default();
        let (whole, inside) = (&prefix[..cut], &prefix.as_bytes()[cut + 1..]);
        let node = if whole.is_empty() { root } else { self.descend(root, whole) };
        let end = self.edge(node | INSIDE, inside, IndexBuilder::root);
        self.lengths.push((node, inside.len() as u32));
        self.candidates.push((end, List::Prefix, rank));
    }

    /// The index, and what ends at each node; roots are not reached by an entry, so their owners must keep theirs.
    pub(crate) fn finish(mut self) -> (Index, Vec<Ends>) {
        let mut lists = Vec::new();
        let ends = self.settle_ends(&mut lists);
        let places = self.edges.len() * LOAD.1 / LOAD.0 + 1;
        let mut entries = vec![VACANT_ENTRY; places];
        let mut long_texts = Vec::new();
        for edge in &self.edges {
            let text = edge_text(&self.texts, edge);
            let mut place = place_of(hash_of(&self.hash, edge.parent, text), places);
            while entries[place].parent != VACANT {
                place = if place + 1 == places { 0 } else { place + 1 };
            }
            // Hosts keep group numbers, which are no nodes.
            let is_host = edge.parent >= SUFFIX_HOST;
            let ends = if is_host { NO_ENDS } else { ends[edge.child as usize] };
            let mut entry = Entry { parent: edge.parent, child: edge.child, len: edge.len, ends, text: [0; INLINE_BYTES] };
            match entry.text.get_mut(..text.len()) {
                Some(inline) => inline.copy_from_slice(text),
                None => {
                    entry.text[..4].copy_from_slice(&(long_texts.len() as u32).to_ne_bytes());
                    long_texts.extend_from_slice(text);
                }
            }
            entries[place] = entry;
        }
        let index = Index { hash: self.hash, entries: entries.into(), long_texts: long_texts.into(), lists: lists.into() };
        (index, ends)
    }

    fn settle_ends(&mut self, lists: &mut Vec<u32>) -> Vec<Ends> {
        let mut ends = vec![NO_ENDS; self.node_count as usize];
        let mut keep = |items: &mut dyn ExactSizeIterator<Item = u32>| {
            let at = lists.len() as u32;
            lists.push(items.len() as u32);
            lists.extend(items);
            at
        };
        self.candidates.sort_unstable();
        for same in self.candidates.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (node, list, first) = same[0];
            let slot = match list {
                List::Exact => &mut ends[node as usize].exact,
                List::Prefix => &mut ends[node as usize].prefix,
            };
            *slot = if same.len() == 1 { first } else { keep(&mut same.iter().map(|candidate| candidate.2)) | SEVERAL };
        }
        self.lengths.sort_unstable_by_key(|&(node, length)| (node, std::cmp::Reverse(length)));
        self.lengths.dedup();
        for same in self.lengths.chunk_by(|a, b| a.0 == b.0) {
            ends[same[0].0 as usize].lengths = keep(&mut same.iter().map(|&(_, length)| length));
        }
        ends
    }
}

fn edge_text<'a>(texts: &'a [u8], edge: &Edge) -> &'a [u8] {
    &texts[edge.text as usize..edge.text as usize + edge.len as usize]
}
