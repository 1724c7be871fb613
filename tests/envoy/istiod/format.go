package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// lineWidth is the width up to which a value is on one line.
const lineWidth = 160

// format returns JSON with sorted keys. A value that fits into a line is on one, so that a change of
// an object is a short difference and files are small.
func format(value any) []byte {
	var text bytes.Buffer
	appendValue(&text, value, "")
	text.WriteByte('\n')
	return text.Bytes()
}

func appendValue(text *bytes.Buffer, value any, indent string) {
	short := quoted(value)
	if len(indent)+len(short) <= lineWidth {
		text.WriteString(short)
		return
	}
	inner := indent + " "
	switch value := value.(type) {
	case map[string]any:
		separator := "{\n"
		for _, key := range slices.Sorted(maps.Keys(value)) {
			fmt.Fprintf(text, "%s%s%s: ", separator, inner, quoted(key))
			appendValue(text, value[key], inner)
			separator = ",\n"
		}
		text.WriteString("\n" + indent + "}")
	case []any:
		separator := "[\n"
		for _, item := range value {
			text.WriteString(separator + inner)
			appendValue(text, item, inner)
			separator = ",\n"
		}
		text.WriteString("\n" + indent + "]")
	default:
		text.WriteString(short)
	}
}

// quoted returns a value as JSON on one line, with sorted keys.
func quoted(value any) string {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		panic(err) // the values are maps, lists and texts that were read from JSON
	}
	return string(bytes.TrimSpace(text.Bytes()))
}
