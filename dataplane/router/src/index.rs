//! Path index of one service: a trie of path segments, flattened into one open-addressed table with
//! the key (node, segment). The entry that leads to a node contains what ends at the node, so that
//! a step down a path costs one cache line. The index does not evaluate conditions. Its candidates
//! are ranks; smaller ranks win. Start with [`PathIndex::child`] to read it and with
//! [`PathIndexBuilder`] to build it.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

/// Number of a node in the trie; below [`INSIDE`].
pub(crate) type TrieNodeId = u32;
/// Position of a match in the order of precedence; below [`SEVERAL`].
pub(crate) type Rank = u32;

/// Marks a node as the parent of the string prefixes that end inside its next segment.
const INSIDE: u32 = 1 << 31;
/// Parents of exact hosts, of suffixes, and of vacant entries. No node has these numbers.
const EXACT_HOST: u32 = u32::MAX;
const SUFFIX_HOST: u32 = u32::MAX - 1;
const VACANT: u32 = u32::MAX - 2;

/// Bit of a slot that is an offset in `lists`. Without this bit the slot itself is a rank.
const SEVERAL: u32 = 1 << 31;
const NOTHING: u32 = u32::MAX;
/// Ranks that the index can represent at most.
pub(crate) const RANKS_MAX: usize = SEVERAL as usize;

/// Segments up to this length are stored in their entry, longer ones in `long_texts`. With this
/// length an entry has 48 bytes (`LOAD`). Most segments of paths are shorter.
const INLINE_BYTES: usize = 24;
/// Load factor: three entries per five positions. Linear probing stays short, and an entry of 48
/// bytes costs 80 bytes. Nobody measured other factors.
const LOAD: (usize, usize) = (3, 5);

/// Selects one of a node's two candidate lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CandidateList {
    /// Candidates that match if the path ends here.
    Exact,
    /// Candidates that match if the path ends here or continues with `/`. At a node inside a
    /// segment they match any continuation.
    Prefix,
}

/// Matches that end at a node: two slots of candidates, and the list of lengths of the string
/// prefixes inside its next segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeCandidates {
    exact: u32,
    prefix: u32,
    lengths: u32,
}

const NO_ENDS: NodeCandidates = NodeCandidates {
    exact: NOTHING,
    prefix: NOTHING,
    lengths: NOTHING,
};

/// Entry of the table, in 48 bytes. It contains the text, so that segments with equal hashes are
/// not confused.
#[derive(Debug, Clone, Copy)]
struct TrieEdgeEntry {
    parent: u32,
    child: TrieNodeId,
    len: u32,
    ends: NodeCandidates,
    /// Text of the segment. For a long one, the first four bytes are its offset in `long_texts`.
    text: [u8; INLINE_BYTES],
}

const VACANT_ENTRY: TrieEdgeEntry = TrieEdgeEntry {
    parent: VACANT,
    child: 0,
    len: 0,
    ends: NO_ENDS,
    text: [0; INLINE_BYTES],
};
const _: () = assert!(size_of::<TrieEdgeEntry>() == 48);

/// Index that is complete and read-only.
#[derive(Debug)]
pub(crate) struct PathIndex {
    hash: RandomState,
    /// Table of entries. It is never full, so probing ends at a vacant entry.
    entries: Box<[TrieEdgeEntry]>,
    long_texts: Box<[u8]>,
    /// Lists of ranks or lengths, each with its count in front.
    lists: Box<[u32]>,
}

/// Node that a search has reached, and what ends there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReachedNode<'a> {
    pub(crate) node: TrieNodeId,
    pub(crate) ends: &'a NodeCandidates,
}

#[inline]
fn hash_of(hash: &RandomState, parent: u32, text: &[u8]) -> u64 {
    let mut hasher = hash.build_hasher();
    hasher.write_u32(parent);
    hasher.write(text);
    hasher.finish()
}

/// Returns the position where probing starts. The high half of the product spreads evenly over any
/// number of positions.
#[inline]
fn place_of(hash: u64, places: usize) -> usize {
    ((u128::from(hash) * places as u128) >> 64) as usize
}

impl PathIndex {
    #[inline]
    fn entry(&self, parent: u32, text: &[u8]) -> Option<&TrieEdgeEntry> {
        let mut place = place_of(hash_of(&self.hash, parent, text), self.entries.len());
        loop {
            let entry = &self.entries[place];
            if entry.parent == parent && self.text_of(entry) == text {
                return Some(entry);
            }
            if entry.parent == VACANT {
                return None;
            }
            place = if place + 1 == self.entries.len() {
                0
            } else {
                place + 1
            };
        }
    }

    #[inline]
    fn text_of<'a>(&'a self, entry: &'a TrieEdgeEntry) -> &'a [u8] {
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

    /// Returns the node that follows a whole segment.
    #[inline]
    pub(crate) fn child(&self, node: TrieNodeId, segment: &[u8]) -> Option<ReachedNode<'_>> {
        self.entry(node, segment).map(|entry| ReachedNode {
            node: entry.child,
            ends: &entry.ends,
        })
    }

    /// Returns the group number of an exact host.
    pub(crate) fn exact_host(&self, host: &[u8]) -> Option<u32> {
        self.entry(EXACT_HOST, host).map(|entry| entry.child)
    }

    /// Returns the group number of a suffix, which begins with a dot.
    pub(crate) fn suffix_host(&self, suffix: &[u8]) -> Option<u32> {
        self.entry(SUFFIX_HOST, suffix).map(|entry| entry.child)
    }

    /// Returns a node's candidates in order of rank.
    #[inline]
    pub(crate) fn candidates<'a>(
        &'a self,
        ends: &'a NodeCandidates,
        list: CandidateList,
    ) -> &'a [Rank] {
        let slot = match list {
            CandidateList::Exact => &ends.exact,
            CandidateList::Prefix => &ends.prefix,
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

    /// Iterates over the string prefixes that end inside the segment at the start of `rest`,
    /// longest first.
    pub(crate) fn inside<'a>(
        &'a self,
        from: ReachedNode<'a>,
        rest: &'a [u8],
    ) -> impl Iterator<Item = &'a NodeCandidates> {
        let lengths = if from.ends.lengths == NOTHING {
            &[]
        } else {
            self.list(from.ends.lengths)
        };
        lengths
            .iter()
            .filter_map(move |&length| rest.get(..length as usize))
            .filter_map(move |text| self.entry(from.node | INSIDE, text))
            .map(|entry| &entry.ends)
    }

    /// Returns the bytes on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.entries) + self.long_texts.len() + size_of_val(&*self.lists)
    }
}

/// Edge of the trie while the index is built.
#[derive(Debug, Clone, Copy)]
struct EdgeBuilder {
    parent: u32,
    child: TrieNodeId,
    text: u32,
    len: u32,
}

/// Collects paths and builds a [`PathIndex`] of them.
pub(crate) struct PathIndexBuilder {
    hash: RandomState,
    edges: HashTable<EdgeBuilder>,
    texts: Vec<u8>,
    node_count: u32,
    candidates: Vec<(TrieNodeId, CandidateList, Rank)>,
    lengths: Vec<(TrieNodeId, u32)>,
}

impl PathIndexBuilder {
    pub(crate) fn new() -> Self {
        PathIndexBuilder {
            hash: RandomState::default(),
            edges: HashTable::new(),
            texts: Vec::new(),
            node_count: 0,
            candidates: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// Creates the root of a new trie.
    pub(crate) fn root(&mut self) -> TrieNodeId {
        self.node_count += 1;
        self.node_count - 1
    }

    /// Returns the child at `text`; `make` creates it if it does not exist.
    fn edge(&mut self, parent: u32, text: &[u8], make: impl FnOnce(&mut Self) -> u32) -> u32 {
        let hash = hash_of(&self.hash, parent, text);
        let same =
            |edge: &EdgeBuilder| edge.parent == parent && edge_text(&self.texts, edge) == text;
        if let Some(edge) = self.edges.find(hash, same) {
            return edge.child;
        }
        let edge = EdgeBuilder {
            parent,
            child: make(self),
            text: self.texts.len() as u32,
            len: text.len() as u32,
        };
        self.texts.extend_from_slice(text);
        let (seed, texts) = (&self.hash, &self.texts);
        self.edges.insert_unique(hash, edge, |edge| {
            hash_of(seed, edge.parent, edge_text(texts, edge))
        });
        edge.child
    }

    /// Returns the group number of an exact host. A new host gets `fresh`.
    pub(crate) fn exact_host(&mut self, host: &[u8], fresh: u32) -> u32 {
        self.edge(EXACT_HOST, host, |_| fresh)
    }

    /// Returns the group number of a suffix. A new suffix gets `fresh`.
    pub(crate) fn suffix_host(&mut self, suffix: &[u8], fresh: u32) -> u32 {
        self.edge(SUFFIX_HOST, suffix, |_| fresh)
    }

    /// Returns the node after all segments of `path`, which begins with `/`; creates missing nodes.
    fn descend(&mut self, root: TrieNodeId, path: &str) -> TrieNodeId {
        path.as_bytes()[1..]
            .split(|&b| b == b'/')
            .fold(root, |node, segment| {
                self.edge(node, segment, PathIndexBuilder::root)
            })
    }

    /// Adds a match of exactly this path.
    pub(crate) fn add_exact(&mut self, root: TrieNodeId, path: &str, rank: Rank) {
        let node = self.descend(root, path);
        self.candidates.push((node, CandidateList::Exact, rank));
    }

    /// Adds a match of paths that begin with these elements. A trailing `/` is ignored, so `/`
    /// matches every path.
    pub(crate) fn add_element_prefix(&mut self, root: TrieNodeId, path: &str, rank: Rank) {
        let path = path.strip_suffix('/').unwrap_or(path);
        let node = if path.is_empty() {
            root
        } else {
            self.descend(root, path)
        };
        self.candidates.push((node, CandidateList::Prefix, rank));
    }

    /// Adds a match of paths that begin with this text.
    pub(crate) fn add_string_prefix(&mut self, root: TrieNodeId, prefix: &str, rank: Rank) {
        let cut = prefix.rfind('/').unwrap_or_default();
        let (whole, inside) = (&prefix[..cut], &prefix.as_bytes()[cut + 1..]);
        let node = if whole.is_empty() {
            root
        } else {
            self.descend(root, whole)
        };
        let end = self.edge(node | INSIDE, inside, PathIndexBuilder::root);
        self.lengths.push((node, inside.len() as u32));
        self.candidates.push((end, CandidateList::Prefix, rank));
    }

    /// Returns the index, and what ends at each node. No entry leads to a root, so the owner of a
    /// root must store what ends there.
    pub(crate) fn finish(mut self) -> (PathIndex, Vec<NodeCandidates>) {
        let mut lists = Vec::new();
        let ends = self.settle_ends(&mut lists);
        let places = self.edges.len() * LOAD.1 / LOAD.0 + 1;
        let mut entries = vec![VACANT_ENTRY; places];
        let mut long_texts = Vec::new();
        for edge in &self.edges {
            let text = edge_text(&self.texts, edge);
            let mut place = place_of(hash_of(&self.hash, edge.parent, text), places);
            // Linear probing. It ends, because `LOAD` leaves vacant positions.
            while entries[place].parent != VACANT {
                place = if place + 1 == places { 0 } else { place + 1 };
            }
            // A host's child is a group number, not a node.
            let is_host = edge.parent >= SUFFIX_HOST;
            let ends = if is_host {
                NO_ENDS
            } else {
                ends[edge.child as usize]
            };
            let mut entry = TrieEdgeEntry {
                parent: edge.parent,
                child: edge.child,
                len: edge.len,
                ends,
                text: [0; INLINE_BYTES],
            };
            match entry.text.get_mut(..text.len()) {
                Some(inline) => inline.copy_from_slice(text),
                // A text that does not fit is stored elsewhere; the entry has its offset.
                None => {
                    entry.text[..4].copy_from_slice(&(long_texts.len() as u32).to_ne_bytes());
                    long_texts.extend_from_slice(text);
                }
            }
            entries[place] = entry;
        }
        let index = PathIndex {
            hash: self.hash,
            entries: entries.into(),
            long_texts: long_texts.into(),
            lists: lists.into(),
        };
        (index, ends)
    }

    fn settle_ends(&mut self, lists: &mut Vec<u32>) -> Vec<NodeCandidates> {
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
                CandidateList::Exact => &mut ends[node as usize].exact,
                CandidateList::Prefix => &mut ends[node as usize].prefix,
            };
            *slot = if same.len() == 1 {
                first
            } else {
                keep(&mut same.iter().map(|candidate| candidate.2)) | SEVERAL
            };
        }
        self.lengths
            .sort_unstable_by_key(|&(node, length)| (node, std::cmp::Reverse(length)));
        self.lengths.dedup();
        for same in self.lengths.chunk_by(|a, b| a.0 == b.0) {
            ends[same[0].0 as usize].lengths = keep(&mut same.iter().map(|&(_, length)| length));
        }
        ends
    }
}

fn edge_text<'a>(texts: &'a [u8], edge: &EdgeBuilder) -> &'a [u8] {
    &texts[edge.text as usize..edge.text as usize + edge.len as usize]
}
