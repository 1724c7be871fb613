package conformance

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/yaml"
)

// worldName differs in each run, so that several runs can have a world each.
var worldName = fmt.Sprintf("conformance-%d", os.Getpid())

const (
	tenantName = "conformance"
	// meshManifests are the suite's servers and clients of its mesh tests.
	meshManifests = "mesh/manifests.yaml"
)

// topology is what a world is made from: the suite's Deployments become pods of one tenant, one for
// each replica, and its Services the tenant's, with the addresses that a cluster would give them.
type topology struct {
	pods     []topologyPod
	services []*unstructured.Unstructured
}

// topologyPod is a pod in the words of a world's file.
type topologyPod struct {
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	Node      string            `json:"node"`
	Labels    map[string]string `json:"labels"`
	Command   []string          `json:"command"`
	Env       map[string]string `json:"env"`
	Readiness map[string]any    `json:"readiness"`
}

// hostName is the pod's name in the world, which numbers its pods.
func (p topologyPod) hostName() string { return p.Name + "-0" }

// newTopology reads the suite's manifest. The echo program is the server of each pod.
func newTopology(manifest, echo string) (*topology, error) {
	objects, err := readObjects(manifest)
	if err != nil {
		return nil, err
	}
	t := &topology{}
	for _, object := range objects {
		switch object.GetKind() {
		case "Deployment":
			deployment := &appsv1.Deployment{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, deployment); err != nil {
				return nil, fmt.Errorf("%s: Deployment %s: %w", manifest, object.GetName(), err)
			}
			t.addPods(deployment, echo)
		case "Service":
			if err := setAddresses(object, len(t.services)+1); err != nil {
				return nil, err
			}
			t.services = append(t.services, object)
		}
	}
	return t, nil
}

// addPods adds a pod for each replica. The suite takes the backend of an answer from the pod's name
// without its last two parts, so a pod is named DEPLOYMENT-rN, to which the world adds its number.
func (t *topology) addPods(deployment *appsv1.Deployment, echo string) {
	replicas := 1
	if deployment.Spec.Replicas != nil {
		replicas = int(*deployment.Spec.Replicas)
	}
	args := deployment.Spec.Template.Spec.Containers[0].Args
	if len(args) == 0 {
		args = []string{"--port=8080"}
	}
	for i := range replicas {
		pod := topologyPod{
			Name:      fmt.Sprintf("%s-r%d", deployment.Name, i),
			Namespace: deployment.Namespace,
			Node:      fmt.Sprintf("node-%d", len(t.pods)%2+1),
			Labels:    deployment.Spec.Template.Labels,
			Command:   append([]string{echo, "advanced"}, args...),
			Readiness: map[string]any{"tcp": map[string]any{"port": 8080}, "periodMs": 200},
		}
		pod.Env = map[string]string{"POD_NAME": pod.hostName(), "NAMESPACE": pod.Namespace}
		t.pods = append(t.pods, pod)
	}
}

// setAddresses gives a Service the number-th address of each family of the tenant's Services.
func setAddresses(service *unstructured.Unstructured, number int) error {
	addresses := []string{fmt.Sprintf("10.101.0.%d", number), fmt.Sprintf("fd00:101::%x", number)}
	if err := unstructured.SetNestedField(service.Object, addresses[0], "spec", "clusterIP"); err != nil {
		return err
	}
	return unstructured.SetNestedStringSlice(service.Object, addresses, "spec", "clusterIPs")
}

// write writes the world's file and the tenant's Services into the folder, and returns the file.
func (t *topology) write(folder string) (string, error) {
	var services bytes.Buffer
	for _, service := range t.services {
		text, err := yaml.Marshal(service.Object)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&services, "---\n%s", text)
	}
	if err := os.WriteFile(filepath.Join(folder, "services.yaml"), services.Bytes(), 0o644); err != nil {
		return "", err
	}
	type object = map[string]any
	text, err := yaml.Marshal(object{
		"world":      worldName,
		"azs":        []string{"az1"},
		"controller": object{"az": "az1"},
		"edges":      []object{{"name": "edge-1", "az": "az1"}},
		"gateways": []object{
			{"name": "gw-1", "az": "az1", "backend": "b1"}, {"name": "gw-2", "az": "az1", "backend": "b1"},
		},
		"tenants": []object{{
			"name":                  tenantName,
			"vni":                   101,
			"trustDomain":           "conformance.example",
			"outboundTrafficPolicy": "Deny",
			"podCidrs":              []string{"10.1.0.0/16", "fd00:1::/64"},
			"serviceCidrs":          []string{"10.101.0.0/16", "fd00:101::/64"},
			"gatewayCidrs":          []string{"10.102.0.0/20", "fd00:102::/64"},
			"config":                []string{"services.yaml"},
			"nodes":                 []object{{"name": "node-1", "az": "az1"}, {"name": "node-2", "az": "az1"}},
			"pods":                  t.pods,
		}},
	})
	if err != nil {
		return "", err
	}
	file := filepath.Join(folder, "world.yaml")
	return file, os.WriteFile(file, text, 0o644)
}

// readObjects returns the objects of one of the suite's manifests.
func readObjects(manifest string) ([]*unstructured.Unstructured, error) {
	text, err := fs.ReadFile(conformance.Manifests, manifest)
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	decoder := yamlutil.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); err == io.EOF {
			return objects, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", manifest, err)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
}
