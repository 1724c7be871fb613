package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// defaults are the schemas of Gateway API's kinds by version and kind, whose defaults an API server
// writes into objects. The suite compares references with them.
type defaults map[string]*apiextensionsv1.JSONSchemaProps

// readDefaults reads the definitions that Gateway API publishes.
func readDefaults(crds string) (defaults, error) {
	files, err := filepath.Glob(filepath.Join(crds, "*.yaml"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("%s has no definitions of kinds: %w", crds, err)
	}
	schemas := defaults{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		definition := apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(text, &definition); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, version := range definition.Spec.Versions {
			if version.Schema != nil {
				key := definition.Spec.Group + "/" + version.Name + "/" + definition.Spec.Names.Kind
				schemas[key] = version.Schema.OpenAPIV3Schema
			}
		}
	}
	return schemas, nil
}

// findCRDs returns the folder of Gateway API's definitions, of the experimental channel.
func findCRDs() (string, error) {
	folder, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	return filepath.Join(strings.TrimSpace(string(folder)), "config", "crd", "experimental"), err
}

// set writes the defaults of its kind into the object.
func (d defaults) set(object client.Object, scheme *runtime.Scheme) error {
	kinds, _, err := scheme.ObjectKinds(object)
	if err != nil {
		return err
	}
	schema := d[kinds[0].GroupVersion().String()+"/"+kinds[0].Kind]
	if schema == nil {
		return nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return err
	}
	if spec, ok := schema.Properties["spec"]; ok {
		if err := setDefaults(content["spec"], &spec); err != nil {
			return err
		}
	}
	if object, ok := object.(*unstructured.Unstructured); ok {
		object.Object = content
		return nil
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(content, object)
}

// setDefaults writes the defaults of missing fields into a value, as an API server does.
func setDefaults(value any, schema *apiextensionsv1.JSONSchemaProps) error {
	switch value := value.(type) {
	case map[string]any:
		for name, field := range schema.Properties {
			if _, ok := value[name]; !ok && field.Default != nil {
				var written any
				if err := json.Unmarshal(field.Default.Raw, &written); err != nil {
					return err
				}
				value[name] = written
			}
			if err := setDefaults(value[name], &field); err != nil {
				return err
			}
		}
	case []any:
		if schema.Items == nil || schema.Items.Schema == nil {
			return nil
		}
		for _, item := range value {
			if err := setDefaults(item, schema.Items.Schema); err != nil {
				return err
			}
		}
	}
	return nil
}
